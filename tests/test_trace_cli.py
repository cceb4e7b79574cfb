"""`hfpatch trace` on tiny checkpoints: as a real process where that matters, elsewhere in this one."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3ForCausalLM,
    PreTrainedTokenizerFast,
)

import hfpatch as hfpatch_module
from hfpatch.lab.tiny import rescale, tiny_model
from tests.conftest import OVERFLOWING, Ran
from tests.test_cli import hfpatch

UNKNOWN, START = "<unk>", "<s>"
APPLY = "tried on this call: finite: hfpatch.apply(model, only=['fp16-residual-overflow'])"


def save(model: nn.Module, folder: Path, tokenizer: bool = True) -> Path:
    """A checkpoint with a tokenizer of 64 characters."""
    model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    if tokenizer:
        words = [UNKNOWN, START, *map(chr, range(ord(" "), ord(" ") + 62))]
        made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN, bos_token=START).save_pretrained(folder)
    return folder


def tiny() -> nn.Module:
    """A Gemma without padding: token 0 is `<unk>` here."""
    return tiny_model("gemma3_text", pad_token_id=None)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny(), tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It declares float32, in which it is fine."""
    model = tiny()
    rescale(model, {}, OVERFLOWING)
    return save(model, tmp_path_factory.mktemp("overflowing"))


@pytest.fixture
def changed(healthy: Path, tmp_path: Path) -> Callable[[Callable[[Path], object]], Path]:
    """`changed(how)`: a copy of the healthy checkpoint, changed by a function of its directory."""

    def copy(how: Callable[[Path], object]) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(healthy, folder)
        how(folder)
        return folder

    return copy


Trace = Callable[..., Ran]


@pytest.fixture
def trace(here: Callable[..., Ran]) -> Trace:
    """`trace(MODEL, ..., code=0)`: the command line, run in this process; it ends with `code`."""
    return partial(here, "trace")


@pytest.fixture
def bad(trace: Trace) -> Callable[..., str]:
    """`bad(MODEL, ...)`: the one sentence it says before it ends with 2."""
    return lambda *words: trace(*words, code=2).sentence


def test_what_overflows_is_found_and_the_patch_named(overflowing: Path) -> None:
    done = hfpatch("trace", overflowing, "--dtype", "float16")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    assert text.endswith(APPLY)
    assert "float16 on cpu" in text
    assert "of the built-in text, forward" in text
    assert "residual add in model.layers.2" in text
    assert "starts here" in next(line for line in lines if line.startswith("model.layers.2 "))


def test_the_line_it_ends_with_cures_the_model(overflowing: Path, trace: Trace) -> None:
    line = trace(overflowing, "--dtype", "float16", code=1).text.rpartition("finite: ")[2]
    model = Gemma3ForCausalLM.from_pretrained(overflowing, dtype=torch.float16)
    exec(line, {"hfpatch": hfpatch_module, "model": model})  # noqa: S102
    with hfpatch_module.trace(model) as t, torch.no_grad():
        logits = model(torch.arange(24)[None]).logits
    assert logits.isfinite().all()
    assert t.first_bad is None


def test_a_healthy_one(healthy: Path, overflowing: Path, trace: Trace) -> None:
    ran = trace(healthy, "--backward")
    assert "Nothing went wrong." in ran.text
    assert "forward, and backward from a loss of 4." in ran.text
    assert "Nothing went wrong." in trace(overflowing).text


@pytest.mark.slow
def test_json(overflowing: Path, healthy: Path, trace: Trace) -> None:
    keys = {"model", "run", "checkpoint", "findings", "intentional", "advice", "patches"}
    shown = trace(overflowing, "--dtype", "fp16", "--tokens", "24", "--backward", "--json", code=1).figures
    assert set(shown) == keys
    assert shown["run"] == {
        "class": "Gemma3ForCausalLM",
        "dtype": "float16",
        "device": "cpu",
        "attention": "sdpa",
        "text": "built in",
        "tokens": 24,
        "backward": True,
        "loss": None,  # NaN
        "loss_scale": 1.0,
    }
    (finding,) = shown["findings"]
    assert (finding["symptom"], finding["module"]) == ("residual-overflow", "model.layers.2")
    assert shown["advice"] == [APPLY]
    assert shown["patches"] == ["fp16-residual-overflow"]

    shown = trace(healthy, "--json", "--headroom", "float8_e4m3fn").figures
    assert set(shown) == keys | {"headroom"}
    assert shown["findings"] == shown["advice"] == shown["patches"] == []
    assert shown["headroom"]["dtype"] == "float8_e4m3fn"
    assert shown["checkpoint"] == {"missing": [], "unexpected": [], "nonfinite": {}}


def test_headroom_foretells_the_overflow(overflowing: Path, trace: Trace) -> None:
    ran = trace(overflowing, "--headroom", "float16")  # ends with 0: nothing went wrong yet
    assert "headroom in float16" in ran.text
    assert "It starts at output of model.layers.2." in ran.text


def test_text(healthy: Path, tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "long.txt"
    text.write_text("MANY WORDS " * 10_000)
    run = trace(healthy, "--text", text, "--tokens", "20", "--json").figures["run"]
    assert (run["text"], run["tokens"]) == (str(text), 20)
    run = trace(healthy, "--text", text, "--tokens", "9999", "--json").figures["run"]
    assert run["tokens"] == 128, "the model has no more positions"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"NINE CHAR")))
    assert "9 tokens of stdin" in trace(healthy, "--text", "-").text


@pytest.mark.slow
def test_a_loss_scale(healthy: Path, trace: Trace) -> None:
    ran = trace(healthy, "--dtype", "float16", "--backward", "--loss-scale", "1e6", "--json", code=1)
    assert ran.figures["run"]["loss_scale"] == 1e6
    (finding,) = ran.figures["findings"]
    assert (finding["symptom"], finding["ordinary"]) == ("scale-too-high", True)
    assert ran.figures["patches"] == []


def test_files(overflowing: Path, tmp_path: Path, trace: Trace) -> None:
    page, picture, out = tmp_path / "t.html", tmp_path / "t.png", tmp_path / "t.json"
    words = ("--dtype", "float16", "--html", page, "--plot", picture, "--out", out)
    said = trace(overflowing, *words, code=1).stderr.splitlines()
    assert said == [f"hfpatch: wrote {path}" for path in (page, picture, out)]
    assert "only=[&#39;fp16-residual-overflow&#39;]" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(out.read_text())["findings"][0]["module"] == "model.layers.2"
    assert sorted(tmp_path.iterdir()) == [page, out, picture]


class TestCheckpoints:
    def test_bad_weights_are_named(self, tmp_path: Path, trace: Trace) -> None:
        model: Any = tiny_model("gemma3_text")
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, :3] = float("nan")
            model.model.layers[3].self_attn.q_proj.weight[0, 0] = float("inf")
        text = trace(save(model, tmp_path / "nan"), code=1).text
        assert "2 not finite in the checkpoint: model.layers.1.mlp.up_proj.weight (3 NaN of 1,536 elements)" in text
        assert "model.layers.3.self_attn.q_proj.weight (1 +Inf of 1,024 elements)" in text
        assert "No patch is known for this; check the checkpoint" in text
        shown = trace(tmp_path / "nan", "--json", code=1).figures
        assert shown["findings"][0]["symptom"] == "bad-weight"
        assert shown["checkpoint"]["nonfinite"]["model.layers.1.mlp.up_proj.weight"] == "3 NaN of 1,536 elements"

    def test_what_is_missing_and_what_is_too_much(self, changed: Any, trace: Trace) -> None:
        def edit(folder: Path) -> None:
            file = folder / "model.safetensors"
            weights = {k: v for k, v in load_file(file).items() if "layers.2." not in k}
            save_file({**weights, "extra.weight": torch.ones(3)}, file, metadata={"format": "pt"})

        folder = changed(edit)
        text = trace(folder).text
        assert "13 not in the checkpoint, so random: model.layers.2.input_layernorm.weight" in text
        assert "and 8 more" in text
        assert "1 in the checkpoint, but not used: extra.weight" in text
        shown = trace(folder, "--json").figures["checkpoint"]
        assert len(shown["missing"]) == 13
        assert shown["unexpected"] == ["extra.weight"]

    def test_shards(self, tmp_path: Path, trace: Trace, bad: Any) -> None:
        folder = save(tiny_model("llama"), tmp_path / "llama")
        tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
        (folder / "model.safetensors").unlink()
        for file in (tmp_path / "shards").glob("model*"):
            shutil.copy(file, folder)
        assert "LlamaForCausalLM" in trace(folder).text
        shard = next(folder.glob("model-00002-*"))
        shard.unlink()
        assert shard.name in bad(folder)

    def test_from_the_hub_cache(
        self, overflowing: Path, tmp_path: Path, trace: Trace, bad: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for name in ("whole", "config"):
            place = tmp_path / f"models--org--{name}"
            (place / "refs").mkdir(parents=True)
            (place / "refs" / "main").write_text("abc")
            shutil.copytree(overflowing, place / "snapshots" / "abc")
        for file in (tmp_path / "models--org--config" / "snapshots" / "abc").iterdir():
            if file.name != "config.json":
                file.unlink()
        assert trace("org/whole", "--dtype", "float16", code=1).text.endswith(APPLY)
        assert "not in the local hub cache; download them first (hf download org/config)" in bad("org/config")

    def test_pickles_are_never_read(self, changed: Any, bad: Any, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(tmp_path / "exploded"),)

        def edit(folder: Path) -> None:
            (folder / "model.safetensors").unlink()
            torch.save({"model.norm.weight": Bomb()}, folder / "pytorch_model.bin")

        said = bad(changed(edit))
        assert "pytorch_model.bin" in said
        assert "never read" in said
        assert not (tmp_path / "exploded").exists()

    def test_its_own_code_is_not_run(self, changed: Any, bad: Any) -> None:
        def edit(folder: Path) -> None:
            config = json.loads((folder / "config.json").read_text())
            config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
            (folder / "config.json").write_text(json.dumps(config))
            (folder / "own.py").write_text("raise SystemExit('it ran')")

        assert "remote code" in bad(changed(edit))
        assert "is code from the hub" in bad(changed(lambda _: None), "--attention", "someone/attention")

    @pytest.mark.parametrize(
        ("how", "says"),
        [
            (lambda d: [f.unlink() for f in d.iterdir() if f.name != "config.json"], "a config without weights"),
            (
                lambda d: (d / "model.safetensors").rename(d / "other.safetensors"),
                "holds other.safetensors but no model.safetensors",
            ),
            (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 100), "SafetensorError"),
            (lambda d: (d / "model.safetensors").write_bytes(b""), "SafetensorError"),
            (lambda d: os.truncate(d / "model.safetensors", 9000), "SafetensorError"),
            (lambda d: [f.unlink() for f in d.glob("tokenizer*")], "no tokenizer there"),
            (lambda d: (d / "tokenizer.json").write_text('{"version'), "its tokenizer cannot be loaded"),
            (lambda d: (d / "tokenizer.json").unlink(), "its tokenizer cannot be loaded"),
            (
                lambda d: _edit(d / "tokenizer.json", '"type":"WordLevel"', '"type":"Other"'),
                "its tokenizer cannot be loaded",
            ),
            (
                lambda d: _edit(d / "config.json", '"hidden_size": 32', '"hidden_size": 64'),
                "model.embed_tokens.weight is 64x32 in the checkpoint and 64x64 by its config",
            ),
        ],
    )
    def test_broken_ones(self, changed: Any, bad: Any, how: Callable[[Path], object], says: str) -> None:
        assert says in bad(changed(how))

    def test_a_tokenizer_of_another_model(self, tmp_path: Path, bad: Any) -> None:
        assert "its embedding has 40 rows" in bad(save(tiny_model("llama", vocab_size=40), tmp_path / "small"))

    def test_models_without_a_loss(self, tmp_path: Path, trace: Trace, bad: Any) -> None:
        config = BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
        )
        folder = save(BertModel(config), tmp_path / "bert")
        assert "BertModel" in trace(folder).text
        assert "takes no labels" in bad(folder, "--backward")

    def test_a_model_that_cannot_be_run_on_it(self, tmp_path: Path, bad: Any) -> None:
        """A classifier wants one label a text."""
        config = BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
        )
        said = bad(save(BertForSequenceClassification(config), tmp_path / "bert"), "--backward")
        assert "cannot be run on this text, with its tokens as labels: ValueError: Expected input batch_size" in said


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text().replace(": ", ":") if file.name == "tokenizer.json" else file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dtype", "int8"], "want float16, bfloat16"),
        (["--tokens", "0"], "want at least 1"),
        (["--loss-scale", "8"], "--backward"),
        (["--backward", "--loss-scale", "-1"], "want a finite number above 0"),
        (["--backward", "--loss-scale", "nan"], "want a finite number above 0"),
        (["--backward", "--tokens", "1"], "a loss needs two"),
        (["--attention", "other"], "is not supported"),
        (["--device", "moon"], "want cpu, cuda"),
        (["--device", "meta"], "want cpu, cuda"),
        (["--device", "cuda:99"], "GPU"),
        (["--headroom", "int8"], "want one of float16"),
        (["--text", "no-such-file"], "No such file"),
        (["--text", "/"], "is not an ordinary file but a directory"),
        (["--html", "no-such-directory/t.html"], "want a file in a directory that exists"),
    ],
)
def test_bad_options(healthy: Path, bad: Any, words: list[str], says: str) -> None:
    assert says in bad(healthy, *words)


def test_bad_texts(healthy: Path, bad: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"ok \xff")
    assert "its tokenizer makes no token of the text" in bad(healthy, "--text", tmp_path / "empty")
    assert "not UTF-8 at byte 3" in bad(healthy, "--text", tmp_path / "binary")


def test_bad_options_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    for words in (["--help"], ["x", "--text", "no-such-file"], ["x", "--tokens", "0"], ["x", "--html", "/no/t.html"]):
        script = (
            f"import sys; sys.argv = ['hfpatch', 'trace', *{words!r}]\n"
            "from hfpatch.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: print(end.code)\n"
            "assert not {'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == ("0" if words == ["--help"] else "2")


@pytest.mark.thorough
def test_a_bar_is_shown_in_a_terminal(overflowing: Path) -> None:
    """stderr is a terminal: the bar is there, and what stdout says is the same."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hfpatch.cli", "trace", str(overflowing), "--dtype", "float16"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        out = process.stdout.read() if process.stdout else ""
    os.close(ours)
    assert process.returncode == 1
    assert " ".join(out.split()).endswith(APPLY)
    assert "tracing" in shown.decode()
