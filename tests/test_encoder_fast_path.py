"""Adapters in torch's encoder layers count in evaluation, and are no targets where they would not."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.lab.tiny import COMPOSITES, tiny_model
from hfpatch.model.evaluating.as_trained import as_trained
from hfpatch.model.evaluating.fast_path import takes_fast_path
from tests.fingerprint import fingerprint
from tests.processes import python

ID = "encoder-fast-path"
TARGETS = r".*\.linear[12]"
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
PAD = torch.tensor([[False] * 5, [False, False, False, True, True]])


class Net(nn.Module):
    """Encoder layers in a list, or in torch's encoder, and what a run of them returns at real positions."""

    def __init__(self, *, listed: bool = False, batch_first: bool = True, **words: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first, **words)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # layers that have no fast path
            self.encoder = nn.TransformerEncoder(layer, 2)
        if listed:
            self.encoder = nn.ModuleList(self.encoder.layers)  # type: ignore[assignment]
        self.batch_first, self.listed = batch_first, listed

    def forward(self, x: torch.Tensor, pad: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> Any:
        x = x if self.batch_first else x.transpose(0, 1)
        if self.listed:
            for layer in self.encoder:  # type: ignore[attr-defined]
                x = layer(x, src_mask=mask, src_key_padding_mask=pad)
        else:
            x = self.encoder(x, mask=mask, src_key_padding_mask=pad)
        x = x if self.batch_first else x.transpose(0, 1)
        return x if pad is None else x[~pad]


def adapted(model: nn.Module, targets: str = TARGETS) -> Any:
    """Adapters whose B is not 0."""
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=targets))  # type: ignore[arg-type]
    torch.manual_seed(1)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return lora


def trained_and_evaluated(model: nn.Module, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return model.train()(*args), model.eval()(*args)


MASKS: dict[str, tuple[torch.Tensor | None, ...]] = {
    "none": (None, None),
    "padding": (PAD, None),
    "causal": (None, nn.Transformer.generate_square_subsequent_mask(5)),
}


@pytest.mark.parametrize("masks", sorted(MASKS))
@pytest.mark.parametrize("words", [{}, {"activation": "gelu"}, {"norm_first": True}], ids=str)
@pytest.mark.parametrize("listed", [True, False])
def test_an_adapter_counts_in_evaluation_with_the_patch_only(listed: bool, words: Any, masks: str) -> None:
    model = adapted(Net(listed=listed, **words))
    given = (X, *MASKS[masks])
    trained, stock = trained_and_evaluated(model, *given)
    before = fingerprint(model)
    with model.disable_adapter():
        _, plain = trained_and_evaluated(model, *given)
    assert torch.equal(stock, plain)  # ignored
    assert (trained - stock).abs().max() > 0.01
    fix = hfpatch.apply(model, only=ID, verbose=False)
    trained, mended = trained_and_evaluated(model, *given)
    assert torch.allclose(trained, mended, atol=2e-6)
    with model.disable_adapter():
        _, base = trained_and_evaluated(model, *given)
    assert torch.allclose(base, plain, atol=2e-6)  # without the adapters, the same function as before
    fix.revert()
    assert fingerprint(model) == before
    assert torch.equal(trained_and_evaluated(model, *given)[1], stock)


NO_KERNEL: list[dict[str, Any]] = [
    {"batch_first": False},
    {"bias": False},
    {"activation": torch.tanh},
]


@pytest.mark.parametrize("words", NO_KERNEL, ids=["time first", "no bias", "tanh"])
def test_a_layer_without_a_kernel_is_left_alone_and_stays_a_target(words: Any) -> None:
    model = adapted(Net(**words))
    trained, evaluated = trained_and_evaluated(model, X)
    assert torch.allclose(trained, evaluated, atol=2e-6)
    (decision,) = hfpatch.plan(model, only=ID).decisions
    assert decision.decided == "not needed"
    assert "no torch encoder layer with a fused kernel" in decision.reason


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
@pytest.mark.parametrize("heads", [2, 1])
def test_what_takes_the_fast_path_is_what_runs_it(heads: int, eps: float) -> None:
    """Read from the layer, and seen in a profile."""
    layer = nn.TransformerEncoderLayer(16, heads, 32, batch_first=True).eval()
    layer.norm2.eps = eps
    with torch.no_grad(), torch.profiler.profile() as seen:
        layer(X)
    ran = any("_transformer_encoder_layer_fwd" in event.key for event in seen.key_averages())
    assert takes_fast_path(layer) is ran is (heads == 2 and eps == 1e-5)


def test_a_subclass_with_a_forward_of_its_own_has_no_fast_path() -> None:
    class Own(nn.TransformerEncoderLayer):
        def forward(self, src: Any, *_: Any, **__: Any) -> Any:
            return self.linear2(self.linear1(src))

    class Calls(nn.TransformerEncoderLayer):
        def forward(self, src: Any, *args: Any, **words: Any) -> Any:
            return super().forward(src, *args, **words)

    assert not takes_fast_path(Own(16, 2, 32, batch_first=True))
    assert takes_fast_path(Calls(16, 2, 32, batch_first=True))


def test_a_module_of_the_users_own_in_place_of_a_map_counts_too() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = Net()
    model.encoder.layers[1].linear2 = Doubled(32, 16)
    decision = hfpatch.plan(model, only=ID).decisions[0]
    assert (decision.decided, len(decision.edits)) == ("applied", 2)  # one layer, and the encoder around it
    assert "encoder.layers.1.linear2" in decision.reason
    trained, stock = trained_and_evaluated(model, X, PAD)
    hfpatch.apply(model, only=ID, verbose=False)
    assert not torch.allclose(trained, stock, atol=0.01)
    assert torch.allclose(*trained_and_evaluated(model, X, PAD), atol=2e-6)


def test_an_adapter_on_the_attention_counts_too() -> None:
    model = adapted(Net(), r".*\.self_attn")
    trained, stock = trained_and_evaluated(model, X)
    assert (trained - stock).abs().max() > 0.01
    hfpatch.apply(model, only=ID, verbose=False)
    assert torch.allclose(*trained_and_evaluated(model, X), atol=2e-6)


class TestTargets:
    @staticmethod
    def of(model: nn.Module) -> tuple[set[str], dict[str, str]]:
        targets = hfpatch.lora_targets(model, "all")
        maps = {p for p in targets.modules if p.startswith("encoder.")}
        return maps, {o.path: o.reason for o in targets.left_out if o.path.startswith("encoder.")}

    def test_left_out_with_the_patch_to_apply_and_back_with_it(self) -> None:
        model = COMPOSITES["torch-encoder-plain"](tiny_model("llama"))
        maps, out = self.of(model)
        assert not maps
        assert {"encoder.layers.*.linear1", "encoder.layers.*.linear2"} <= set(out)
        assert ID in out["encoder.layers.*.linear1"]
        (decision,) = (d for d in hfpatch.plan(model).decisions if d.patch == ID)
        assert (decision.decided, decision.code) == ("opt-in", "offered")
        fix = hfpatch.apply(model, include=ID, verbose=False)
        maps, out = self.of(model)
        assert maps == {f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
        assert set(out) == {"encoder.layers.*.self_attn.out_proj"}
        fix.revert()
        assert not self.of(model)[0]

    def test_targets_where_the_layer_has_no_kernel(self) -> None:
        model = COMPOSITES["torch-encoder-time-first"](tiny_model("llama"))
        assert len(self.of(model)[0]) == 4


class TestLife:
    def test_copies_pickles_and_compiled(self) -> None:
        model = adapted(Net())
        want, stock = trained_and_evaluated(model, X)
        before = fingerprint(model)
        fix = hfpatch.apply(model, only=ID, verbose=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert torch.allclose(trained_and_evaluated(other, X)[1], want, atol=2e-6)
            hfpatch.revert(other)
            assert torch.equal(trained_and_evaluated(other, X)[1], stock)
        fix.revert()
        assert fingerprint(model) == before

    def test_compiled_before_and_after(self) -> None:
        model = adapted(Net()).eval()
        want, stock = trained_and_evaluated(model, X)
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            assert torch.allclose(compiled(X), stock, atol=2e-6)
            fix = hfpatch.apply(model, only=ID, verbose=False)
            assert torch.allclose(compiled(X), want, atol=2e-6)
            fix.revert()
            assert torch.allclose(compiled(X), stock, atol=2e-6)

    @pytest.mark.thorough
    def test_a_pickle_in_a_new_process(self, tmp_path: Path) -> None:
        model = COMPOSITES["torch-encoder"](tiny_model("llama"))
        ids = torch.arange(6)[None]
        hfpatch.apply(model, only=ID, verbose=False)
        with torch.no_grad():
            want = model(input_ids=ids).logits
        torch.save((model, ids, want), tmp_path / "model.pt")
        script = (
            "import sys, torch, hfpatch\n"
            "model, ids, want = torch.load(sys.argv[1], weights_only=False)\n"
            "with torch.no_grad(): now = model(input_ids=ids).logits\n"
            "print(torch.allclose(now, want, atol=1e-6), *hfpatch.status(model).patches)\n"
        )
        out = python("-c", script, str(tmp_path / "model.pt"))
        assert out.stdout.split() == ["True", ID]

    def test_one_that_was_undone_by_hand_is_made_again(self) -> None:
        model = adapted(Net())
        hfpatch.apply(model, only=ID, verbose=False)
        model.base_model.model.encoder.layers[0].activation_relu_or_gelu = 1
        assert "gone" in hfpatch.plan(model, only=ID).decisions[0].lapsed
        hfpatch.apply(model, only=ID, verbose=False)
        assert torch.allclose(*trained_and_evaluated(model, X), atol=2e-6)


def test_verify_compares_with_a_reference_in_which_adapters_count() -> None:
    model = COMPOSITES["torch-encoder"](tiny_model("llama"))
    batch = {"input_ids": torch.arange(8).reshape(2, 4)}
    (seen,) = (r for r in hfpatch.verify(model, batch).rows if r.name == "as it is")
    assert seen.kl > 1e-6
    rows = {r.name: r.kl for r in hfpatch.apply(model, only=ID, verbose=False).verify(batch).rows}
    assert rows["before"] > 1e-6
    assert rows["after"] < 1e-9


def test_a_reference_leaves_the_model_as_it_was() -> None:
    model = adapted(Net()).eval()
    before = fingerprint(model)
    with pytest.raises(KeyboardInterrupt), as_trained(model), torch.no_grad():
        assert not any(map(takes_fast_path, model.modules()))
        model(X)
        raise KeyboardInterrupt
    assert fingerprint(model) == before
