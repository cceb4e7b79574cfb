"""The command line: one file per verb. Help, `list` and `explain` import no torch.

Exit codes: 0 success; 1 a fault was found, or a verification failed; 2 bad input, explained in one sentence.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hfpatch.cli import (
    check,
    compare,
    demo,
    doctor,
    explain,
    inspect,
    listing,
    new,
    plan,
    prove,
    replay,
    scan,
    trace,
    verify,
)
from hfpatch.errors import HfpatchError

app = typer.Typer(
    name="hfpatch",
    help="Declarative, reversible, proved patches for loaded Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from hfpatch import __version__

        print(f"hfpatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before the verb."""


app.command("inspect", short_help="Architecture, norms and their eps, attention, hazards, the plan.")(inspect.inspect)
app.command("plan", short_help="What each patch would do to a model, and why.")(plan.plan)
app.command("list", short_help="The patches.")(listing.list_patches)
app.command("explain", short_help="One patch: its defect, changes, cost, limits and sources.")(explain.explain)
app.command("new", short_help="Write the beginning of a patch.")(new.new)
app.command("prove", short_help="Run a patch's repros on tiny models of its architectures.")(prove.prove)
app.command("verify", short_help="A model in several dtypes beside float32; or patches' cases.")(verify.verify)
app.command("trace", short_help="The first operation that makes NaN or Inf; the patch to try.")(trace.trace)
app.command("scan", short_help="NaN, Inf, broken or missing shards in files of weights.")(scan.scan)
app.command("check", short_help="Hazards of a model with training arguments.")(check.check)
app.command("compare", short_help="The first operation where two models part, and the cause.")(compare.compare)
app.command("doctor", short_help="All of it on one page, and which way to run a model here.")(doctor.doctor)
app.command("replay", short_help="Run the batch of a bundle again, on a checkpoint.")(replay.replay)
app.command("demo", short_help="Fix a tiny model whose float16 stream overflows. No download.")(demo.demo)


def main() -> None:
    """Run the command line; an `HfpatchError` becomes one sentence on stderr and exit code 2."""
    try:
        app()
    except HfpatchError as error:
        print(f"hfpatch: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader closed the pipe (`hfpatch list | head`)
        sys.stderr.close()
        sys.exit(0)
