"""`hfpatch trace`: run a checkpoint on some text, and name the first operation that goes wrong."""

from __future__ import annotations

import math
import sys
import traceback
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.cli.common import (
    Json,
    TrustRemoteCode,
    broken_patch_files,
    quiet_transformers,
    read_text,
    show,
    torch_device,
)
from hfpatch.errors import InputError
from hfpatch.report.sheet import Sheet, Shown, say

if TYPE_CHECKING:
    import torch

    from hfpatch.tracing.checkpoint import Checkpoint
    from hfpatch.tracing.headroom import Headroom
    from hfpatch.tracing.trace import Trace

NAMED = 5
"""Number of tensors that a note names; `--json` has all."""

File = Path | None


@dataclass(frozen=True, repr=False)
class Traced(Shown):
    """A checkpoint that was run under a trace.

    Attributes:
        checkpoint: Which.
        trace: Of the run.
        run: How it was run: class, dtype, device, attention, text, tokens, backward, loss, loss_scale.
        headroom: In another dtype, if it was asked for.
    """

    checkpoint: Checkpoint
    trace: Trace
    run: dict[str, Any]
    headroom: Headroom | None

    @property
    def nonfinite(self) -> dict[str, str]:
        """Return the parameters that are not finite, each with what it holds."""
        broken = [e for step in self.trace.steps for e in step.of("weights") if e.bad and e.role == "parameter"]
        return {f"{e.module}.{e.name}".lstrip("."): e.stats.holds for e in broken}

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON, without the statistics of each tensor, which `Trace.to_dict` has."""
        return {
            "model": self.checkpoint.name,
            "run": self.run,
            "checkpoint": {
                "missing": list(self.checkpoint.missing),
                "unexpected": list(self.checkpoint.unexpected),
                "nonfinite": self.nonfinite,
            },
            "findings": [f.to_dict() for f in self.trace.findings],
            "intentional": self.trace.intentional,
            "advice": list(self.trace.advice),
            "patches": list(self.trace.patches),
            **({"headroom": self.headroom.to_dict()} if self.headroom else {}),
        }

    def sheet(self) -> Sheet:
        """Return the report of the trace, and what is amiss in the checkpoint."""
        report, checkpoint = self.trace.report(), self.checkpoint
        notes = [
            *_named("not in the checkpoint, so random", checkpoint.missing),
            *_named("in the checkpoint, but not used", checkpoint.unexpected),
            *_named("not finite in the checkpoint", [f"{name} ({holds})" for name, holds in self.nonfinite.items()]),
        ]
        return replace(report, title=_title(checkpoint.name, self.run), notes=(*notes, *report.notes))

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the headroom, if it was asked for, and the report."""
        return (*(self.headroom.sheets() if self.headroom else ()), self.sheet())


def trace(
    model: Annotated[
        str, typer.Argument(help="A local directory, or a hub name in the local cache.", show_default=False)
    ],
    text: Annotated[
        str | None, typer.Option(help="Text file to run, - for stdin. Default: a built-in text.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Run at most this many tokens.")] = 512,
    dtype: Annotated[
        str | None, typer.Option(help="Load the weights as float32, float16 or bfloat16. Default: the checkpoint's.")
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Trace the loss (labels: the text itself) and its gradients.")
    ] = False,
    loss_scale: Annotated[
        float | None, typer.Option(help="Multiply the loss, as a GradScaler does (its first scale is 65536).")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="eager, sdpa, ... Default: chosen by transformers.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")] = None,
    headroom: Annotated[
        str | None, typer.Option(help="Report what would overflow or become 0 in this dtype, e.g. float16.")
    ] = None,
    html: Annotated[File, typer.Option(help="Write a picture of the blocks, a curve, to this HTML file.")] = None,
    plot: Annotated[File, typer.Option(help="Write the picture to this PNG file (needs matplotlib).")] = None,
    out: Annotated[File, typer.Option(help="Write the statistics of every tensor to this JSON file.")] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run a checkpoint on text, and name the first operation that makes NaN or Inf, and the patch to try.

    If every value is finite, name the operation in which the signal, or its gradient, grows or vanishes, if there is
    one.

    Exit 1 if a fault is found.

    The model is in evaluation mode. The loss is scaled only with --loss-scale: a scale can cause overflows itself.

    JSON: `{"model", "run", "checkpoint", "findings", "intentional", "advice", "patches"}`, and `headroom` with
    --headroom.
    """
    _check(tokens, backward, loss_scale, html, plot, out)
    words = read_text(text, tokens)
    broken_patch_files()
    quiet_transformers()
    import transformers

    from hfpatch.patching.arguments import as_dtype
    from hfpatch.tracing.checkpoint import load
    from hfpatch.tracing.headroom import headroom as in_dtype

    if headroom is not None:
        in_dtype((), headroom)  # a wrong name is reported before the weights are loaded
    if sys.stderr.isatty():
        transformers.logging.enable_progress_bar()
    chosen = torch_device(device)
    checkpoint = load(
        model,
        dtype=as_dtype(dtype),
        device=chosen,
        attention=attention,
        trust_remote_code=trust_remote_code,
    )
    batch = checkpoint.batch(words, tokens, loss=backward)
    scale = (loss_scale or 1.0) if backward else None
    traced, loss, raised = _run(checkpoint, batch, scale)
    if raised and all(f.raised for f in traced.findings):
        how = "on this text, with its tokens as labels" if backward else "on this text"
        raise InputError(f"{model}: the model cannot be run {how}: {raised}")
    room = traced.headroom(headroom, loss_scale=scale or 1.0) if headroom is not None else None
    show(Traced(checkpoint, traced, _facts(checkpoint, batch, text, loss, scale), room), json)
    for path, write in ((html, traced.to_html), (plot, traced.plot), (out, traced.to_json)):
        if path is not None:
            write(path)
            say([f"hfpatch: wrote {path}"])
    if raised:
        say([f"hfpatch: after that the model raised: {raised}"])
    if traced.findings:
        raise typer.Exit(1)


def _check(tokens: int, backward: bool, loss_scale: float | None, html: File, plot: File, out: File) -> None:
    """Check the options before anything is imported or loaded."""
    if tokens < 1:
        raise InputError(f"--tokens {tokens}: want at least 1")
    if loss_scale is not None and not backward:
        raise InputError("--loss-scale multiplies the loss, which is computed only with --backward; add --backward")
    if loss_scale is not None and not (loss_scale > 0 and math.isfinite(loss_scale)):
        raise InputError(f"--loss-scale {loss_scale:g}: want a finite number above 0")
    for path in (html, plot, out):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"cannot write {path}: want a file in a directory that exists")
    if plot is not None and find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install hfpatch[plot]")


def _run(
    checkpoint: Checkpoint, batch: dict[str, torch.Tensor], scale: float | None
) -> tuple[Trace, float | None, str | None]:
    """Return the trace of one pass, the loss, and the error that ended the pass, or None.

    The backward pass is traced too if `scale` is not None; it is the factor on the loss.
    """
    import torch

    from hfpatch.advice import trace as watch
    from hfpatch.model.source import REJECTIONS
    from hfpatch.report.progress import progress
    from hfpatch.tracing.checkpoint import reason
    from hfpatch.tracing.watched import places

    model = checkpoint.model
    found = places(model)
    passes = (len(found.containers) + len(found.blocks)) * (1 if scale is None else 2)
    loss = raised = None
    with progress(f"tracing {checkpoint.name}", passes) as advance:
        traced = watch(model, backward=scale is not None, progress=lambda _: advance(1))
        try:
            with traced, torch.set_grad_enabled(scale is not None):
                output: Any = model(**batch)
                if scale is not None:
                    loss = float(output.loss)
                    (output.loss * scale).backward()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{checkpoint.name}: not enough memory on {model.device}; try fewer --tokens, a narrower --dtype, or "
                "--device cpu"
            ) from error
        except REJECTIONS as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raised = f"{reason(error)} ({Path(last.filename).name}:{last.lineno})"
    return traced, loss, raised


def _facts(
    checkpoint: Checkpoint, batch: dict[str, torch.Tensor], text: str | None, loss: float | None, scale: float | None
) -> dict[str, Any]:
    from hfpatch.compat.implementation import chosen
    from hfpatch.dtypes import dtype_name

    model = checkpoint.model
    return {
        "class": type(model).__name__,
        "dtype": dtype_name(model.dtype),
        "device": str(model.device),
        "attention": chosen(model.config),
        "text": "built in" if text is None else text,
        "tokens": batch["input_ids"].shape[1],
        "backward": scale is not None,
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "loss_scale": scale,
    }


def _title(name: str, run: dict[str, Any]) -> str:
    which = "the built-in text" if run["text"] == "built in" else "stdin" if run["text"] == "-" else run["text"]
    how = "forward"
    if run["backward"]:
        loss = "a loss that is not finite" if run["loss"] is None else f"a loss of {run['loss']:.4g}"
        scale = f" x {run['loss_scale']:,g}" if run["loss_scale"] != 1 else ""
        how = f"forward, and backward from {loss}{scale}"
    where = f"{run['dtype']} on {run['device']}, {run['attention']} attention"
    length = f"{run['tokens']:,} token{'' if run['tokens'] == 1 else 's'}"
    return f"{name} ({run['class']}, {where})\n{length} of {which}, {how}"


def _named(what: str, names: list[str] | tuple[str, ...]) -> list[str]:
    """Return a list with a note about these tensors; an empty list if there are no tensors."""
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"{len(names)} {what}: {', '.join(names[:NAMED])}{more}"] if names else []
