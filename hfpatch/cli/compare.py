"""`hfpatch compare`: run two checkpoints on a text, and name the first operation where they part."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import Json, TrustRemoteCode, quiet_transformers, read_text, say_missing, show, torch_device
from hfpatch.errors import InputError
from hfpatch.report.sheet import say

Two = list[str] | None


def compare(
    a: Annotated[
        str, typer.Argument(help="A: a local directory, or a hub name in the local cache.", show_default=False)
    ],
    b: Annotated[
        str | None,
        typer.Argument(help="B: another one. Default: A again, with the second --dtype.", show_default=False),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Text file to run, - for stdin. Default: a built-in text.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Run at most this many tokens.")] = 128,
    dtype: Annotated[
        Two, typer.Option(help="float32, float16 or bfloat16; twice for A and B. Default: each one's own.")
    ] = None,
    attention: Annotated[Two, typer.Option(help="eager, sdpa, ...; twice for A and B.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run two checkpoints on text, and name the first operation where they part by more than rounding explains.

    Exit 1 if they part. Both are in evaluation mode; the text becomes tokens by A's tokenizer.

    JSON: `{"a", "b", "equal", "parts", "sentence", "places", "compared", "facts", "weights", "end", "notes"}`.
    """
    if tokens < 2:
        raise InputError(f"--tokens {tokens}: want at least 2, a loss needs two")
    dtypes, ways = _two("--dtype", dtype), _two("--attention", attention)
    if b is None and len(set(dtypes)) == 1 and len(set(ways)) == 1:
        raise InputError("compare: name a second model, or give --dtype or --attention twice, for A and for B")
    words = read_text(text, tokens)
    quiet_transformers()
    from hfpatch.comparing.two_models import compare as compared
    from hfpatch.patching.arguments import as_dtype
    from hfpatch.tracing.checkpoint import load, load_model

    types = [as_dtype(d) for d in dtypes]
    chosen = torch_device(device)
    one = load(a, dtype=types[0], device=chosen, attention=ways[0], trust_remote_code=trust_remote_code)
    other, missing, unexpected = load_model(
        b or a, dtype=types[1], device=chosen, attention=ways[1], trust_remote_code=trust_remote_code
    )
    for side, name, lost, extra in (("A", a, one.missing, one.unexpected), ("B", b or a, missing, unexpected)):
        say_missing(lost, f"{side}, {name}: ")
        if extra:
            say([f"hfpatch: {side}, {name}: {len(extra)} tensors in the checkpoint are not used ({extra[0]}, ...)"])
    found = compared(one.model, other, one.batch(words, tokens, loss=False))
    show(found, json)
    if found:
        raise typer.Exit(1)


def _two(option: str, values: Two) -> tuple[str | None, str | None]:
    """Return an option's value for A and for B."""
    given = values or [None]
    if len(given) > 2:
        raise InputError(f"{option} was given {len(given)} times; want one for both models, or one for A and one for B")
    return given[0], given[-1]
