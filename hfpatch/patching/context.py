"""The input of a patch's functions: one submodel of an object, and the caller's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hfpatch.dtypes import dtype_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hfpatch.inspecting.peaks import Peaks
    from hfpatch.model.attention import Attention
    from hfpatch.model.roles import Stack
    from hfpatch.model.survey import Survey
    from hfpatch.model.walk import Submodel


@dataclass(frozen=True)
class Target:
    """A module that an edit would change, with its path."""

    path: str
    module: nn.Module


@dataclass(frozen=True)
class Context:
    """The object, one of its submodels, and the caller's options. Reading it changes nothing.

    Attributes:
        survey: Of the whole object.
        submodel: The submodel that is decided about; None for the object as a whole.
        compute_dtype: The dtype the model will run in, if that is not the dtype of its weights.
        options: The options of the patch, with defaults filled in.
        peaks: The largest values on the caller's batch; None without a batch.
    """

    survey: Survey
    submodel: Submodel | None
    compute_dtype: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    peaks: Peaks | None = field(default=None, kw_only=True)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of layers: an encoder's first, the decoder's last; empty if none was recognised."""
        return () if self.submodel is None else self.survey.stacks.get(self.submodel.path, ())

    @property
    def stack(self) -> Stack | None:
        """The decoder's stack of layers; None if none was recognised."""
        return self.stacks[-1] if self.stacks else None

    @cached_property
    def stream_dtype(self) -> torch.dtype | None:
        """Dtype of the decoder's residual stream, from its present weights; None without a stack."""
        from hfpatch.model.roles import stream_dtype

        if self.submodel is None or self.stack is None:
            return None
        return stream_dtype(self.survey, self.submodel, self.stack)

    @property
    def dtype(self) -> str:
        """Name of the dtype the submodel computes in: the caller's `compute_dtype`, else the dtype of most weights."""
        from hfpatch.model.roles import weights_dtype

        dtype = self.compute_dtype or (weights_dtype(self.submodel.model) if self.submodel else None)
        return dtype_name(dtype)

    @property
    def attentions(self) -> list[Attention]:
        """The submodel's own attention modules that use transformers' `AttentionInterface`."""
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
        """Path of the language model that added modules outside all submodels feed; None if unknown.

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
