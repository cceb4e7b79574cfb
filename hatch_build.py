"""Puts `patches/` into the wheel as `hfpatch/patches`; an editable install reads the folder itself."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PatchesHook(BuildHookInterface[Any]):
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder, but not to an editable wheel, where the copy would go stale."""
        if version != "editable":
            build_data["force_include"]["patches"] = "hfpatch/patches"
