"""Looks up the proof that a decision needs: shipped, cached, or run now. Over ranks, rank 0 runs it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import ranks
from hfpatch.patching.context import Context
from hfpatch.patching.language import Needed, NotNeeded, Refused
from hfpatch.patching.proofs import shelf
from hfpatch.patching.proofs.bodies import Code, code_of, of_transformers, subject, with_model_flags
from hfpatch.patching.proofs.own import prove_own
from hfpatch.patching.proofs.proof import Proof, Subject, is_saved
from hfpatch.patching.registry import Entry

WAIT = 120
"""Seconds that a rank waits for rank 0's proof before it runs its own."""

FOUND: dict[Subject, Proof] = {}
"""Proofs on demand that this process has looked up or run."""

_ONE_AT_A_TIME = threading.RLock()
"""Held while a proof runs: torch's random state is that of all threads."""


def proof_verdict(entry: Entry, context: Context, *, own: bool = False) -> Needed | NotNeeded | Refused | None:
    """Return None if a shipped proof covers a submodel, else what the proof on demand says.

    Args:
        entry: The patch.
        context: The submodel.
        own: True to prove classes that are not transformers' own too: they are built in another process.

    Returns:
        `Needed` with a remark if the patch was proved on demand, or if an architecture that is proved could not be
        tried with these flags or bodies; `NotNeeded` if the fault cannot occur; `Refused` if the patch does not cure it
        or was never proved, or if a forward is not transformers' own.
    """
    if context.submodel is None or not entry.patch.depends_on:
        return None
    code = code_of(entry, context)
    if code.set_here:
        return Refused(f"it was not tested with {code.set_here[0]}, which no repro of this patch runs", "foreign-code")
    about = subject(entry, context, code)
    if code.own or not of_transformers(about.architecture):
        model = context.submodel.model
        if own:
            whole = json.dumps({**about.settings, "config": str(model.config.to_dict())}, sort_keys=True)
            return _of_own(entry, model, replace(about, flags=whole), _untested(code, model))
        return Refused(f'{_untested(code, model)}; prove="own" tries it on a tiny model of your class', "foreign-code")
    if (proof := shelf.find(shelf.shipped(entry.file), about)) is None:
        return _on_demand(entry, with_model_flags(about, context, code), code)
    match proof.outcome:
        case "proved":
            return None
        case "not cured":
            return Refused(f"it does not cure a tiny {about.name}: {proof.text}", "not-cured")
        case _:
            return _verdict(proof, about.name, "", _untried(entry, proof, ""))


def _on_demand(entry: Entry, about: Subject, code: Code) -> Needed | NotNeeded | Refused:
    """Return what a proof that is run now, or was run before on this machine, says."""
    proof = on_demand(entry, about)
    known = frozenset(b for p in _shipped_for(entry, about) for b in p.subject.bodies)
    new = ", ".join(name for name, body in code.stock.items() if body not in known) if known else ""
    runs = f", which runs {new}, changed since the shipped proofs" if new else ""
    return _verdict(proof, about.name, runs, _untried(entry, proof, runs))


def _verdict(proof: Proof, name: str, runs: str, untried: Needed | Refused) -> Needed | NotNeeded | Refused:
    """Return what a proof that was run here says.

    Args:
        proof: The proof.
        name: Name of its tiny model.
        runs: Words on what that runs; empty for code of the shipped proofs.
        untried: The verdict where nothing could be tried.
    """
    match proof.outcome:
        case "proved":
            return Needed(f"proved here, on a tiny {name}{runs}")
        case "harmless":
            return NotNeeded(f"on a tiny {name}, {proof.text}", "harmless")
        case "not cured":
            return Refused(f"tried here, it does not cure a tiny {name}{runs}: {proof.text}", "not-cured")
        case "untried":
            return untried


def _untested(code: Code, model: PreTrainedModel) -> str:
    name = next(iter(code.own), type(model).__qualname__)
    return f"it was not tested with {name}, which no repro of this patch runs"


def _of_own(entry: Entry, model: PreTrainedModel, about: Subject, untested: str) -> Needed | NotNeeded | Refused:
    """Return what a proof on a tiny model of the user's own class says."""
    proof, name = _found(about, lambda: prove_own(entry, model, about)), type(model).__name__
    untried = Refused(f"{untested}, and it could not be tried on a tiny {name}: {proof.text}", "foreign-code")
    return _verdict(proof, name, "", untried)


def _untried(entry: Entry, proof: Proof, runs: str) -> Needed | Refused:
    """Return a warning if this code is proved with another config, else a refusal."""
    name = proof.subject.name
    if any(p.outcome == "proved" for p in _shipped_for(entry, proof.subject)) and not runs:
        return Needed(f"warning: not proved for {name}: {proof.text}")
    return Refused(f"it is not proved for {name}{runs}: {proof.text}", "not-served")


def _shipped_for(entry: Entry, about: Subject) -> list[Proof]:
    """Return the shipped proofs of this patch, as it is, for an architecture, of any release and with any flags."""
    proofs = shelf.shipped(entry.file)
    return [p for p in proofs if p.subject.patch == about.patch and p.subject.architecture == about.architecture]


def on_demand(entry: Entry, about: Subject) -> Proof:
    """Return the proof of a subject, from the cache or by running the repros now, the same on every rank."""
    return _found(about, lambda: _cached_or_run(entry, about))


def _found(about: Subject, run: Callable[[], Proof]) -> Proof:
    with _ONE_AT_A_TIME:
        proof = _same_on_all_ranks(about, lambda: FOUND.get(about) or run())
        if proof.text != NO_VALUES:
            FOUND[about] = proof
        return proof


def _same_on_all_ranks(about: Subject, run: Callable[[], Proof]) -> Proof:
    """Return the proof that rank 0 has found; without an answer from it in time, that of this rank.

    Each rank runs those that no other process could use.
    """
    store = ranks.store() if is_saved(about) else None
    key = f"hfpatch/proof/{about.key}"
    if store is None:
        return run()
    if torch.distributed.get_rank() > 0:
        if about in FOUND:
            return FOUND[about]
        answer = ranks.wait_for(store, key, WAIT)
        return run() if answer is None else Proof.from_dict(json.loads(answer))
    proof = run()
    if proof.text != NO_VALUES:
        store.set(key, json.dumps(proof.to_dict()))
    return proof


NO_VALUES = "this is a context in which weights get no values (init_empty_weights, a fake mode); plan outside it"
"""Text of a proof that could not be run where the plan was made. It is not kept."""


def _cached_or_run(entry: Entry, about: Subject) -> Proof:
    from hfpatch.patching.proofs.prove import prove

    if (proof := shelf.cached(about)) is not None:
        return proof
    # the result must not depend on the caller's contexts; autocast is off in every plan
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.device("cpu"):
        weight = nn.LayerNorm(1).weight  # draws no random number
        if type(weight.data) is not torch.Tensor or weight.is_meta:
            return Proof(about, "untried", NO_VALUES)
        proof = prove(entry, about.architecture, about)
    if proof is None:
        return Proof(about, "untried", "its tiny model has no such submodel that reads tokens")
    shelf.keep(about, proof)
    return proof
