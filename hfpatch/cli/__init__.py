"""The command line: one file per verb. Help, `list` and `explain` import no torch.

Exit codes: 0 success; 1 a fault was found, or a verification failed; 2 bad input, explained in one sentence.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hfpatch.cli import check, demo, explain, inspect, listing, new, plan, prove, replay, scan, trace, verify
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


app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("list")(listing.list_patches)
app.command("explain")(explain.explain)
app.command("new")(new.new)
app.command("prove")(prove.prove)
app.command("verify")(verify.verify)
app.command("trace")(trace.trace)
app.command("scan")(scan.scan)
app.command("check")(check.check)
app.command("replay")(replay.replay)
app.command("demo")(demo.demo)


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
