"""Proofs: shipped, proved on demand, kept in a cache; and what a plan says of each outcome."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.lab.tiny import tiny_config, tiny_model
from hfpatch.patching import edits, registry, select
from hfpatch.patching.proofs import lookup, shelf
from hfpatch.patching.proofs.bodies import structural
from hfpatch.patching.proofs.proof import Proof, Subject, digest_of_file
from hfpatch.patching.proofs.prove import prove, prove_all
from tests.test_plan import decision

STREAM = "fp16-residual-overflow"
WITH_PROOFS = [e for e in registry.entries().values() if e.patch.serves]


@pytest.fixture
def registered() -> Iterator[None]:
    """What is registered in the test is forgotten after it."""
    yield
    for name in registry.by_hand():
        hfpatch.unregister(name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of proofs, and a process that has looked up none."""
    monkeypatch.setattr(shelf, "cache_folder", lambda: tmp_path / "proofs")
    lookup.FOUND.clear()
    return tmp_path / "proofs"


def subject(**words: Any) -> Subject:
    plain = {"patch": "p", "architecture": "llama", "flags": "{}", "bodies": frozenset("ab")}
    return Subject(**{**plain, "torch": "2.13.0", "transformers": "5.24.0", **words})


class TestShipped:
    @pytest.mark.parametrize("entry", WITH_PROOFS, ids=lambda e: e.id)
    def test_the_file_is_of_the_patch_as_it_is(self, entry: registry.Entry) -> None:
        assert shelf.beside(entry.file).exists()
        here = {p.subject.transformers: set[str]() for p in shelf.shipped(entry.file)}
        for proof in shelf.shipped(entry.file):
            here[proof.subject.transformers].add(proof.subject.patch)
        newest = max(here, key=lambda release: tuple(map(int, release.split("."))))
        assert here[newest] == {entry.digest}, f"hfpatch prove {entry.id} --write"

    def test_docstrings_and_layout_do_not_matter_to_the_digest(self, tmp_path: Path) -> None:
        texts = ('"""One."""\nX = 1\n', '"""Two."""\n\nX = (1)  # a remark\n', '"""Two."""\nX = 2\n')
        files = [tmp_path / f"{i}.py" for i in range(3)]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        one, two, other = map(digest_of_file, files)
        assert one == two != other

    def test_the_registry_answers_from_it_without_torch(self) -> None:
        code = (
            "import sys; from hfpatch.patching import registry\n"
            "print(*(e.id for e in registry.serving('bloom')), '|', *(e.id for e in registry.serving('nope')))\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        bloom, _, unknown = found.stdout.partition("|")
        assert STREAM in bloom.split()
        assert "wo-overflow" not in bloom.split()
        assert STREAM not in unknown.split()
        assert "eager-attention" in unknown.split()

    def test_what_was_served_by_name_still_is(self) -> None:
        names = (Path(__file__).parent / "data" / "served_0.1.txt").read_text().split()
        proved = {*registry.get(STREAM).proved, *registry.get("wo-overflow").proved}
        assert len(names) == 154
        assert set(names) <= proved


class TestFiles:
    def proofs(self) -> list[Proof]:
        flags = json.dumps({"a": True, "kinds": ["x", "y"]})
        return [Proof(subject(), "proved", "fine"), Proof(subject(flags=flags), "untried", 'said "no"')]

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        patch = tmp_path / "some_defect.py"
        shelf.write(shelf.beside(patch), self.proofs())
        assert list(shelf.shipped(patch)) == self.proofs()
        assert len(shelf.beside(patch).read_text().splitlines()) == 4  # a line for each proof

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            (lambda text: text.replace("proved", "harmless"), "checksum"),
            (lambda text: text[: len(text) // 2], "is not valid JSON"),
            (lambda text: text.replace("llama", "bloom"), "checksum"),
            (lambda _: "[]", "TypeError"),
            (lambda _: '{"checksum": "", "proofs": [{"architecture": 3}]}', "KeyError"),
            (lambda text: text.replace('"proved"', '"perfect"'), "perfect"),
        ],
    )
    def test_an_edited_file_is_said_and_counts_for_nothing(self, change: Any, word: str, tmp_path: Path) -> None:
        patch = tmp_path / "some_defect.py"
        shelf.write(shelf.beside(patch), self.proofs())
        shelf.beside(patch).write_text(change(shelf.beside(patch).read_text()))
        with pytest.warns(UserWarning, match=rf"some_defect\.proofs\.json was edited or is damaged .*{word}"):
            assert shelf.shipped(patch) == ()

    def test_releases_are_merged(self) -> None:
        older = Proof(subject(transformers="5.17.0", patch="old"), "proved", "then")
        stale = Proof(subject(architecture="gone", patch="old"), "proved", "stale")
        again = Proof(subject(), "not cured", "now")
        other = Proof(subject(architecture="mistral"), "proved", "not tried now")
        old = [*self.proofs(), older, stale, other]
        assert shelf.merged([again], old, ["llama", "gone"]) == [older, again, other]


class TestSubject:
    def test_a_proof_covers_fewer_bodies_and_nothing_else(self) -> None:
        proof = Proof(subject(), "proved", "")
        assert proof.covers(subject())
        assert proof.covers(subject(bodies=frozenset("a")))
        for other in ({"bodies": frozenset("abc")}, {"torch": "2.12.0"}, {"flags": '{"x": 1}'}, {"patch": "q"}):
            assert not proof.covers(subject(**other))

    def flags(self, architecture: str, **overrides: Any) -> dict[str, Any]:
        model = tiny_model(architecture)
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        return structural(tiny_config(architecture, **overrides), (type(layers[0]),))

    def test_what_the_layers_read_is_a_flag(self) -> None:
        assert self.flags("bloom") == {}
        assert self.flags("bloom", apply_residual_connection_post_layernorm=True) == {
            "apply_residual_connection_post_layernorm": True
        }
        assert self.flags("gpt_neox", use_parallel_residual=False) == {"use_parallel_residual": False}

    def test_sizes_names_and_other_numbers_are_not(self) -> None:
        assert self.flags("llama", hidden_size=48, num_hidden_layers=7, rms_norm_eps=1e-3, attention_bias=True) == {}
        assert self.flags("granite", residual_multiplier=0.25) == {}

    def test_a_list_counts_by_its_kinds(self) -> None:
        assert self.flags("lfm2_moe", layer_types=["full_attention", "conv", "conv", "conv"]) == {}
        assert self.flags("lfm2_moe", layer_types=["conv"] * 4) == {"layer_types": ["conv"]}


class TestOnDemand:
    def bloom(self, **words: Any) -> BloomForCausalLM:
        torch.manual_seed(0)
        return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4, **words)).half()

    def test_a_shipped_proof_needs_no_run(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lookup, "_cached_or_run", lambda *_: pytest.fail("it was proved anew"))
        found = decision(hfpatch.plan(self.bloom()), STREAM)
        assert found.decided == "applied"
        assert "proved" not in found.reason

    @pytest.mark.slow
    def test_what_could_not_be_made_to_fail_is_applied_and_said(self, cache: Path) -> None:
        found = decision(hfpatch.plan(self.bloom(apply_residual_connection_post_layernorm=True), only=STREAM), STREAM)
        assert found.decided == "applied"
        assert (
            "warning: not proved for bloom (apply_residual_connection_post_layernorm=True): bloom float16"
            in found.reason
        )
        (kept,) = cache.iterdir()
        assert json.loads(kept.read_text())["proofs"][0]["outcome"] == "untried"

    def test_a_flag_is_proved_on_a_tiny_model_and_kept(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("gpt_neox", use_parallel_residual=False).half()
        found = decision(hfpatch.plan(model, only=STREAM), STREAM)
        assert found.decided == "applied"
        assert "proved here, on a tiny gpt_neox (use_parallel_residual=False)" in found.reason
        lookup.FOUND.clear()
        monkeypatch.setattr("hfpatch.patching.proofs.prove.prove", lambda *_: pytest.fail("the cache was not read"))
        assert decision(hfpatch.plan(model, only=STREAM), STREAM) == found

    def test_a_damaged_cache_is_said_and_proved_again(self, cache: Path) -> None:
        model = tiny_model("gpt_neox", use_parallel_residual=False).half()
        hfpatch.plan(model, only=STREAM)
        (kept,) = cache.iterdir()
        whole = kept.read_text()
        kept.write_text(whole[:40])
        lookup.FOUND.clear()
        with pytest.warns(UserWarning, match="was edited or is damaged"):
            assert decision(hfpatch.plan(model, only=STREAM), STREAM).decided == "applied"
        assert kept.read_text() == whole

    @pytest.mark.slow
    def test_a_cache_that_cannot_be_written_is_said_once(self, cache: Path, recwarn: pytest.WarningsRecorder) -> None:
        cache.write_text("a file where the folder should be")
        shelf._say_once.cache_clear()
        for value in (False, False):
            lookup.FOUND.clear()
            model = tiny_model("gpt_neox", use_parallel_residual=value).half()
            assert decision(hfpatch.plan(model, only=STREAM), STREAM).decided == "applied"
        said = [w for w in recwarn if "proofs cannot be kept" in str(w.message)]
        assert len(said) == 1

    def test_an_architecture_that_is_not_in_the_file_is_tried(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a release of next week: nothing is known of it but its structure."""
        without = [p for p in shelf.shipped(registry.get(STREAM).file) if p.subject.architecture != "llama"]
        monkeypatch.setattr(shelf, "shipped", lambda _: tuple(without))
        monkeypatch.setattr(registry, "proved_names", shelf.proved_names.__wrapped__)
        assert "llama" not in registry.get(STREAM).proved
        found = decision(hfpatch.plan(tiny_model("llama").half(), only=STREAM), STREAM)
        assert (found.decided, "proved here, on a tiny llama" in found.reason) == ("applied", True)

    @pytest.mark.slow
    def test_another_release_is_proved_here(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hfpatch.patching.proofs.bodies.release", lambda _: "99.0")
        found = decision(hfpatch.plan(tiny_model("llama").half(), only=STREAM), STREAM)
        assert (found.decided, "proved here, on a tiny llama" in found.reason) == ("applied", True)

    def test_what_is_not_cured_is_refused(self, cache: Path) -> None:
        found = decision(hfpatch.plan(tiny_model("reformer").half(), only=STREAM), STREAM)
        assert (found.decided, found.code) == ("refused", "not-cured")
        assert "does not cure a tiny reformer" in found.reason

    @pytest.mark.slow
    @pytest.mark.parametrize("architecture", ["bert", "bart", "xlnet", "openai-gpt"])
    def test_layers_that_normalise_every_sum_need_nothing(self, architecture: str, cache: Path) -> None:
        made = hfpatch.plan(tiny_model(architecture).half(), only=STREAM)
        assert {d.decided for d in made.decisions if d.patch == STREAM} == {"not needed"}
        assert "returned the output of a norm" in decision(made, STREAM).reason

    @pytest.mark.slow
    def test_a_plan_in_an_autocast_region_and_on_meta_proves_the_same(self, cache: Path) -> None:
        with torch.device("meta"):
            model = tiny_model("gpt_neox", use_parallel_residual=False).half().to("meta")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert decision(hfpatch.plan(model, only=STREAM), STREAM).decided == "applied"

    @pytest.mark.slow
    def test_random_states_stay(self, cache: Path) -> None:
        before = torch.get_rng_state()
        hfpatch.plan(tiny_model("gpt_neox", use_parallel_residual=False).half())
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.slow
    @pytest.mark.parametrize("context", [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad])
    def test_the_callers_contexts_do_not_change_a_proof(self, context: Any, cache: Path) -> None:
        model = tiny_model("gpt_neox", use_parallel_residual=False).half()
        with context():
            found = decision(hfpatch.plan(model, only=STREAM), STREAM)
        assert "proved here, on a tiny gpt_neox" in found.reason

    def test_where_weights_get_no_values_nothing_is_kept(self, cache: Path) -> None:
        model = tiny_model("gpt_neox", use_parallel_residual=False).half()
        with init_empty_weights():
            found = decision(hfpatch.plan(model, only=STREAM), STREAM)
        assert "warning: not proved" in found.reason
        assert "plan outside it" in found.reason
        assert not cache.exists()
        assert "proved here, on a tiny gpt_neox" in decision(hfpatch.plan(model, only=STREAM), STREAM).reason

    def test_threads_that_plan_at_once_leave_the_random_state(self, cache: Path) -> None:
        models = [tiny_model("gpt_neox", use_parallel_residual=False).half() for _ in range(2)]
        models += [tiny_model("falcon", parallel_attn=False).half() for _ in range(2)]
        before = torch.get_rng_state()
        with ThreadPoolExecutor(4) as threads:
            plans = list(threads.map(lambda model: hfpatch.plan(model, only=STREAM), models))
        assert torch.equal(torch.get_rng_state(), before)
        assert all("proved here" in decision(made, STREAM).reason for made in plans)

    def test_an_interrupted_proof_leaves_nothing(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any) -> None:
            torch.rand(1)
            raise KeyboardInterrupt

        model = tiny_model("gpt_neox", use_parallel_residual=False).half()
        with monkeypatch.context() as during, torch.random.fork_rng(devices=[]):
            during.setattr("hfpatch.patching.proofs.prove.attempt", interrupt)
            with pytest.raises(KeyboardInterrupt):
                hfpatch.plan(model, only=STREAM)
        assert not lookup.FOUND
        assert not cache.exists()
        assert (torch.get_default_dtype(), torch.empty(1).device.type) == (torch.float32, "cpu")
        assert "proved here" in decision(hfpatch.plan(model, only=STREAM), STREAM).reason


class TestCacheFolder:
    @pytest.mark.thorough
    @pytest.mark.parametrize("place", ["file", "file/below", "none"])
    def test_a_home_that_cannot_be_used_stops_no_plan(self, place: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        folder = "/proc/none" if place == "none" else str(tmp_path / place)
        code = (
            "import hfpatch; from hfpatch.lab.tiny import tiny_model\n"
            "model = tiny_model('gpt_neox', use_parallel_residual=False).half()\n"
            f"print(hfpatch.plan(model, only={STREAM!r}).decisions[0].reason)"
        )
        told = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HF_ASSETS_CACHE": folder},
        )
        assert "proved here, on a tiny gpt_neox" in told.stdout
        assert told.stderr.count("proofs cannot be kept") == 1
        assert "damaged" not in told.stderr


class TestReplacedForwards:
    """Other code may replace the forward of a class of transformers; what runs then has to be proved."""

    def reason(self, forward: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
        monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
        found = decision(hfpatch.plan(tiny_model("llama").half(), only=STREAM), STREAM)
        return found.decided, found.reason

    @pytest.mark.slow
    def test_a_wrapper_is_part_of_the_body(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        was = LlamaDecoderLayer.forward

        @functools.wraps(was)
        def narrow(self: Any, *args: Any, **words: Any) -> Any:
            return was(self, *args, **words).half()

        decided, reason = self.reason(narrow, monkeypatch)
        assert decided == "refused"
        assert "LlamaDecoderLayer.forward, changed since the shipped proofs" in reason

    @pytest.mark.slow
    def test_functions_without_source_are_told_apart(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "def forward(self, *args, **words): return was(self, *args, **words)"
        made: list[dict[str, Any]] = [{"was": LlamaDecoderLayer.forward} for _ in range(2)]
        for words, end in zip(made, ("", ".half()"), strict=True):
            exec(text + end, words)  # noqa: S102 - a function without source
        assert self.reason(made[0]["forward"], monkeypatch)[0] == "applied"
        assert self.reason(made[1]["forward"], monkeypatch)[0] == "refused"
        assert not cache.exists()


class TestRegistered:
    """Patches that a user registers are told apart by what they are, not by where their condition was written."""

    def test_another_patch_with_the_condition_of_ours(self, cache: Path, registered: None) -> None:
        ours = registry.get(STREAM).patch
        hfpatch.register(replace(ours, edits=ours.edits[-2:-1]), id="last-edit-only")
        found = decision(hfpatch.plan(tiny_model("llama").half(), only="last-edit-only"), "last-edit-only")
        assert (found.decided, found.code) == ("refused", "not-cured")
        assert not cache.exists()

    def test_a_file_that_was_edited_and_registered_again(self, cache: Path, registered: None, tmp_path: Path) -> None:
        file, text = tmp_path / "my_stream.py", registry.get(STREAM).file.read_text()
        edit = 'edits.cast_input(select.first_layer(), to="float32"),'
        assert edit in text
        for content, decided in ((text, "applied"), (text.replace(edit, ""), "refused")):
            file.write_text(content)
            name = hfpatch.register(file)
            assert decision(hfpatch.plan(tiny_model("llama").half(), only=name), name).decided == decided
            hfpatch.unregister(name)


def louder(x: torch.Tensor) -> torch.Tensor:
    return x * 1.004


class TestProve:
    def test_a_cure_that_is_not_equivalent_is_none(self, registered: None) -> None:
        """Finite with the patch, and on healthy weights farther from float32 than the patch states."""
        ours = registry.get(STREAM).patch
        more = edits.map_output(select.final_norm(), louder, "0.4 % more")
        hfpatch.register(replace(ours, edits=(*ours.edits, more), tolerance=2e-3), id="not-equivalent")
        proof = prove(registry.get("not-equivalent"), "llama")
        assert proof is not None
        assert proof.outcome == "not cured"
        assert "on healthy weights its logits are" in proof.text

    @pytest.mark.slow
    def test_an_encoder_and_a_decoder_of_one_architecture(self) -> None:
        proof = prove(registry.get(STREAM), "t5_gemma_module")
        assert proof is not None
        assert (proof.outcome, len(proof.subject.bodies)) == ("proved", 3)

    @pytest.mark.slow
    def test_plain_and_default_flags(self) -> None:
        found = list(prove_all(registry.get(STREAM), ["deepseek_v2"]))
        assert [(p.outcome, p.subject.settings) for p in found] == [
            ("proved", {}), ("proved", {"first_k_dense_replace": 0}),
        ]  # fmt: skip

    @pytest.mark.slow
    def test_left_out_are_those_named_and_those_of_another_structure(self) -> None:
        assert list(prove_all(registry.get(STREAM), ["t5", "gemma3"])) == []

    def test_bodies_that_the_tiny_model_does_not_run(self) -> None:
        entry = registry.get(STREAM)
        plain = prove(entry, "llama")
        assert plain is not None
        other = prove(entry, "llama", replace(plain.subject, bodies=plain.subject.bodies | {"another"}))
        assert other is not None
        assert (other.outcome, "1 of the forwards" in other.text) == ("untried", True)

    @pytest.mark.thorough
    @pytest.mark.parametrize("entry", WITH_PROOFS, ids=lambda e: e.id)
    def test_some_of_the_file_are_proved_again(self, entry: registry.Entry) -> None:
        """The suite of every architecture tries the others."""
        for proof in shelf.shipped(entry.file)[::25]:
            if proof.subject.patch == entry.digest:
                again = prove(entry, proof.subject.architecture, proof.subject)
                assert again is not None
                assert again.outcome == proof.outcome, again.text
