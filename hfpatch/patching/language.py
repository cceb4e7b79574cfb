"""The classes that a patch file uses: frozen, validated when created. Imports neither torch nor transformers.

A patch file holds a docstring with fixed headings, pure functions, and `PATCH = Patch(...)`, which refers to them.
The functions read a `Context` and return values; only hfpatch itself writes to a model.
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
"""Effects of the patches that `apply(model)` may run by default: they do not change what trained weights compute."""

HEADINGS = ("What goes wrong", "What this changes", "Numerics", "Known limits", "Sources")
"""Sections of a patch file's docstring, in this order; `explain` shows them."""

ANY = "*"
"""Stands for every architecture in `Patch.architectures`."""


@dataclass(frozen=True)
class Needed:
    """The fault that this patch fixes can occur in this model."""

    reason: str
    code: DecisionCode = "needed"


@dataclass(frozen=True)
class NotNeeded:
    """The fault cannot occur in this model."""

    reason: str
    code: DecisionCode = "no-symptom-possible"


@dataclass(frozen=True)
class Refused:
    """The fault may occur, but this patch does not work on this model."""

    reason: str
    code: DecisionCode = "refused-here"


@dataclass(frozen=True)
class Offered:
    """The patch works on this model, but runs only if it is named, whatever its effect.

    Args:
        reason: Why it does not run by default.
        suggested: True if it fixes something found in this model; then `include="suggested"` runs it too.
        code: A key of `hfpatch.codes.DECISIONS`.
    """

    reason: str
    suggested: bool = True
    code: DecisionCode = "offered"


Verdict = Needed | Offered | NotNeeded | Refused


@dataclass(frozen=True)
class Structure:
    """The submodels that a patch serves, by what they are: of an architecture for which its repros were proved.

    Args:
        description: A noun phrase: "stacks of layers with norms before the branches".
        why_not: Returns why a submodel has not this structure; an empty text if it has.
    """

    description: str
    why_not: Callable[[Context], str]

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True)
class Patch:
    """One declared fix. Its id is the stem of its file, with hyphens.

    Args:
        title: A line that describes the fix.
        condition: Reads the context and returns a verdict: is the patch needed in this model?
        edits: The changes, each with the modules it applies to.
        effect: Effect on the outputs, or a function that decides it from the model.
        symptom: Returns a sentence if a trial of a case shows the fault, else None.
        repros: Cases that show the symptom without the patch and lose it with the patch.
        leaves_alone: Cases in which the plan must not apply the patch.
        architectures: The `config.model_type`s it supports, or `("*",)` for all. Give this or `serves`.
        serves: The structure that it supports. A repro of the architecture `"*"` is then run for each architecture that
            has this structure: by `hfpatch prove`, or in a plan.
        but: Architectures that are known not to work, each with the reason; or that do not need the patch.
        depends_on: Modules of other packages whose forward the patch depends on: a proof counts for these bodies only.
        transformers: Supported releases of transformers, e.g. `>=5.17,<6`.
        fixed_in: The transformers release that made the patch unnecessary.
        options: Names that a caller may set with `options={id: {...}}`, with their defaults.
        tolerance: For `equivalent`: the largest relative L2 distance of the logits from float32, on healthy weights.
        suggests: Advice printed after the decision, e.g. stock alternatives.
        needs: Ids of patches without which this one is of no use: they are considered with it, and it is refused for a
            submodel in which one of them is neither applied nor in force.
        whole: True if the patch is about the whole object and is planned once, not once for each submodel.
        answers: The symptoms it fixes: keys of `hfpatch.symptoms.SYMPTOMS`.
        answers_where_it_edits: Symptoms that it fixes only in modules whose computation it changes.

    Raises:
        ValueError: A field is empty, unknown or malformed.
    """

    title: str
    condition: Callable[[Context], Verdict]
    edits: tuple[Template, ...]
    effect: Effect | Callable[[Context, Any], Effect]
    symptom: Callable[[Trial], str | None]
    repros: tuple[Case, ...]
    leaves_alone: tuple[Case, ...]
    architectures: tuple[str, ...] = ()
    serves: Structure | None = None
    but: Mapping[str, str | NotNeeded] = field(default_factory=dict[str, str | NotNeeded])
    depends_on: tuple[Selection, ...] = ()
    transformers: str = ">=5.17,<6"
    fixed_in: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float | None = None
    suggests: str = ""
    needs: tuple[str, ...] = ()
    whole: bool = False
    answers: tuple[str, ...] = ()
    answers_where_it_edits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.architectures) == (self.serves is not None):
            raise ValueError("want one of architectures=(model types, or ('*',) for all) and serves=Structure(...)")
        if not self.edits:
            raise ValueError("edits is empty: a patch without an edit changes nothing")
        if not self.repros or not self.leaves_alone:
            raise ValueError("repros or leaves_alone is empty: a patch needs at least one case of each")
        if isinstance(self.effect, str) and self.effect not in EFFECTS:
            raise ValueError(f"effect {self.effect!r}: want one of {', '.join(EFFECTS)}")
        if self.effect == "equivalent" and self.tolerance is None:
            raise ValueError("tolerance is None: an equivalent patch needs one")
        if unknown := {*self.answers, *self.answers_where_it_edits} - set(SYMPTOMS):
            raise ValueError(f"answers {', '.join(sorted(unknown))}: no such symptom; want keys of hfpatch.symptoms")
        for bound in self.transformers.split(","):
            if not re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*\d[\w.]*\s*", bound):
                raise ValueError(f"transformers={self.transformers!r}: want bounds such as '>=5.17,<6'")
        for name in ("but", "options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
