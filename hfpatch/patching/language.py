"""The words a patch file is written in. Frozen values, checked when made; imports neither torch nor transformers.

A patch file holds a docstring with fixed headings, pure functions, and `PATCH = Patch(...)` that names them.
The functions read a `Context` and return values; only the engine writes to a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from hfpatch.codes import DecisionCode
from hfpatch.patching.verifying.case import Case
from hfpatch.symptoms import SYMPTOMS

if TYPE_CHECKING:
    from hfpatch.patching.context import Context
    from hfpatch.patching.edits import Template
    from hfpatch.patching.select import Selection
    from hfpatch.patching.verifying.trial import Trial

Effect = Literal["exact", "equivalent", "prepares", "changes-function", "reinitialises", "adds-parameters"]
Decided = Literal["applied", "not needed", "opt-in", "refused"]

EFFECTS: tuple[str, ...] = get_args(Effect)
UNASKED: frozenset[str] = frozenset({"exact", "equivalent", "prepares"})
"""Effects that a bare `apply` may have: none of them changes what trained weights compute."""

HEADINGS = ("What goes wrong", "What this changes", "Numerics", "Known limits", "Sources")
"""Sections of a patch file's docstring, in this order; `explain` and the catalogue are made from them."""

ANY = "*"
"""In `Patch.architectures`: every architecture."""


@dataclass(frozen=True)
class Needed:
    """The fault this patch mends can happen in this model."""

    reason: str
    code: DecisionCode = "needed"


@dataclass(frozen=True)
class NotNeeded:
    """The fault cannot happen here."""

    reason: str
    code: DecisionCode = "no-symptom-possible"


@dataclass(frozen=True)
class Refused:
    """The fault may be there, but this patch does not go with this model."""

    reason: str
    code: DecisionCode = "refused-here"


@dataclass(frozen=True)
class Offered:
    """The patch can be run here, but only by name, whatever its effect.

    Args:
        reason: Why it is not run unasked.
        suggested: It answers something that was found in this model, so `include="suggested"` runs it too.
        code: A key of `hfpatch.codes.DECISIONS`, as the other verdicts have.
    """

    reason: str
    suggested: bool = True
    code: DecisionCode = "offered"


Verdict = Needed | Offered | NotNeeded | Refused


@dataclass(frozen=True)
class Upstream:
    """A method of other packages' classes that the patch leans on.

    Args:
        where: The modules whose classes are meant.
        known: Digests (`hfpatch.patching.drift.digest`) of the bodies the patch was proved against.
        method: The method's name.
    """

    where: Selection
    known: tuple[str, ...]
    method: str = "forward"

    def __post_init__(self) -> None:
        if not self.known:
            raise ValueError(
                f"Upstream({self.where}): known is empty; give the digests of the bodies it was proved against"
            )

    def __str__(self) -> str:
        return f"{self.method} of {self.where}"


@dataclass(frozen=True)
class Patch:
    """One declared fix. Its id is the stem of its file, with hyphens.

    Args:
        title: What it does, in one line.
        architectures: `config.model_type`s it serves, or `("*",)`.
        condition: Reads the context, says whether this model needs the patch.
        edits: What is changed, and where.
        effect: On outputs; decided from the model where it is a function.
        symptom: Looks at a trial of a case; a sentence if the fault shows, None if not.
        repros: Cases that show the symptom unpatched and not patched.
        leaves_alone: Cases in which the plan must not apply the patch.
        transformers: Releases of transformers it is written for, e.g. `>=5.17,<6`.
        fixed_in: The transformers release that made it unnecessary.
        refuses: Architectures it knows and does not serve, each with the reason.
        upstream: Bodies of other packages it leans on.
        options: Names a caller may set with `options={id: {...}}`, with their defaults.
        tolerance: For `equivalent`: largest relative L2 distance of the logits from fp32's, on healthy weights.
        suggests: Said after the decision, e.g. stock alternatives.
        whole: It is about the object as passed, and asked once, not once for each submodel.
        answers: What a tracer finds that this patch mends: keys of `hfpatch.symptoms.SYMPTOMS`.
        answers_where_it_edits: The same, of what is found in a module that the patch lets compute otherwise.
    """

    title: str
    architectures: tuple[str, ...]
    condition: Callable[[Context], Verdict]
    edits: tuple[Template, ...]
    effect: Effect | Callable[[Context, Any], Effect]
    symptom: Callable[[Trial], str | None]
    repros: tuple[Case, ...]
    leaves_alone: tuple[Case, ...]
    transformers: str = ">=5.17,<6"
    fixed_in: str | None = None
    refuses: Mapping[str, str] = field(default_factory=dict[str, str])
    upstream: tuple[Upstream, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float | None = None
    suggests: str = ""
    whole: bool = False
    answers: tuple[str, ...] = ()
    answers_where_it_edits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.architectures:
            raise ValueError("architectures is empty: name model types, or ('*',)")
        if not self.edits:
            raise ValueError("edits is empty: a patch without an edit changes nothing")
        if not self.repros or not self.leaves_alone:
            raise ValueError("a patch needs at least one repro and one case it leaves alone")
        if isinstance(self.effect, str) and self.effect not in EFFECTS:
            raise ValueError(f"effect {self.effect!r}: want one of {', '.join(EFFECTS)}")
        if self.effect == "equivalent" and self.tolerance is None:
            raise ValueError("an equivalent patch states its tolerance")
        if unknown := {*self.answers, *self.answers_where_it_edits} - set(SYMPTOMS):
            raise ValueError(f"answers {', '.join(sorted(unknown))}: no such symptom; want keys of hfpatch.symptoms")
        for bound in self.transformers.split(","):
            if not re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*\d[\w.]*\s*", bound):
                raise ValueError(f"transformers={self.transformers!r}: want bounds such as '>=5.17,<6'")
        for name in ("refuses", "options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
