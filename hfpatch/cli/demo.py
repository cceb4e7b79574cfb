"""`hfpatch demo`: plan, apply, verify and revert on a tiny model."""

from __future__ import annotations

from hfpatch.cli.common import Json, quiet_transformers, show_json


def demo(json: Json = False) -> None:
    """Fix a tiny Gemma 3 whose float16 residual stream overflows: plan, apply, verify, revert. No download.

    JSON: `{"plan": ..., "proof": ..., "status_after_revert": ...}`.
    """
    quiet_transformers()
    import torch

    from hfpatch.lab.tiny import rescale, tiny_model
    from hfpatch.patching.announce import announcement
    from hfpatch.patching.apply import apply, plan
    from hfpatch.patching.status import status

    torch.set_num_threads(1)
    model = tiny_model("gemma3_text")
    rescale(model, {}, {"*post_feedforward_layernorm.weight": 24000.0})
    model = model.half()
    batch = {"input_ids": (torch.arange(48).reshape(2, 24) * 7 + 3) % 64}
    made = plan(model)
    fix = apply(model, verbose=False)
    proof = fix.verify(batch)
    fix.revert()
    after = status(model)
    if json:
        show_json({"plan": made.to_dict(), "proof": proof.to_dict(), "status_after_revert": after.to_dict()})
        return
    print("A tiny random Gemma 3 in float16, scaled so that its residual stream passes 65,504.\n")
    for step, shown in (
        ("plan(model)", made),
        ("fix = apply(model)", "\n".join(announcement(fix.plan))),
        ("fix.verify(batch)", proof),
        ("fix.revert(); status(model)", after),
    ):
        print(f">>> {step}\n{shown}\n")
