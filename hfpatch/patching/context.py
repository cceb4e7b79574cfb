"""What a patch may read when the plan asks it: one submodel of one object, and what the caller said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hfpatch.dtypes import dtype_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hfpatch.model.attention import Attention
    from hfpatch.model.roles import Stack
    from hfpatch.model.survey import Survey
    from hfpatch.model.walk import Submodel


@dataclass(frozen=True)
class Target:
    """One module an edit would change."""

    path: str
    module: nn.Module


@dataclass(frozen=True)
class Context:
    """The object, the submodel in question, and the caller's wishes. Reading it changes nothing."""

    survey: Survey
    submodel: Submodel | None
    compute_dtype: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Layers and their parts: a decoder's last, an encoder's before it; none where there is no such shape."""
        return () if self.submodel is None else self.survey.stacks.get(self.submodel.path, ())

    @property
    def stack(self) -> Stack | None:
        """The decoder's layers and their parts; None where the submodel has no such shape."""
        return self.stacks[-1] if self.stacks else None

    @cached_property
    def stream_dtype(self) -> torch.dtype | None:
        """Dtype of the decoder's residual stream as the weights stand now; None without a stack."""
        from hfpatch.model.roles import stream_dtype

        if self.submodel is None or self.stack is None:
            return None
        return stream_dtype(self.survey, self.submodel, self.stack)

    @property
    def dtype(self) -> str:
        """Name of the dtype the submodel computes in: what the caller plans for, else that of most weights."""
        from hfpatch.model.roles import weights_dtype

        dtype = self.compute_dtype or (weights_dtype(self.submodel.model) if self.submodel else None)
        return dtype_name(dtype)

    @property
    def attentions(self) -> list[Attention]:
        """Attention modules of the submodel's own that go through transformers' `AttentionInterface`."""
        return [] if self.submodel is None else self.survey.attentions[self.submodel.path]

    @property
    def attention(self) -> str:
        """Name of the submodel's attention implementation."""
        from hfpatch.model.attention import implementation

        return "" if self.submodel is None else implementation(self.submodel)

    @property
    def added(self) -> dict[str, nn.Module]:
        """Modules that transformers' own code did not make, by path."""
        return self.survey.added

    @cached_property
    def feeds(self) -> str | None:
        """Path of the language model that added modules outside all submodels feed; None if it cannot be told.

        It is the one with a token embedding, unless the option `backbone` names another.
        """
        from hfpatch.errors import NoEmbeddingError
        from hfpatch.model.embed import resolve

        wanted = self.options.get("backbone")
        if wanted is not None:
            named = [s.path for s in self.survey.submodels if wanted in (s.path, s.architecture)]
            return named[0] if len(named) == 1 else None
        try:
            return resolve(self.survey)[0].path
        except NoEmbeddingError:
            return None
