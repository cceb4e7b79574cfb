"""The training guard: a bad batch is skipped, reported and counted, and a run that cannot continue is stopped.

    outcome.py          Reason, Facts, Outcome: the result for a batch, as plain values
    gradient_norms.py   norms in float32 of plain, half-precision and sharded gradients; clipping
    judge.py            the decision: losses and gradients of one window of micro-batches -> step or skip, on the
                        device. Knows no optimizer and no Trainer
    window.py           the arithmetic of that decision, on the device
    history.py          norms and losses of the last good steps, and the rule that finds a spike among them
    inputs.py           the loss, the number of tokens and the components that a caller passes
    ledger.py           the host's part of the decision: reasons, counters, history, and when to stop
    checks.py           errors and warnings before the first step
    stepping.py         the optimizer: torch's own inside wrappers, its parameters, whether it can skip a step
    guard.py            Guard: steps optimizer, scaler and schedule of a plain loop by the decision
    recorder.py         the interface of a black box (`hfpatch.BlackBox`)
    callback.py         GuardCallback: the same inside a transformers Trainer, on that Trainer's own objects only

    checking/           `hfpatch.check`: hazards.py collects them, rehearsal.py runs a step and puts everything back
    helpers.py          `validate_loss` and `gradient_report`, for your own training loop

Rules that hold everywhere: gradients are judged unscaled and before clipping; a skipped batch changes neither weights
nor optimizer state nor schedule; no loss is replaced and no gradient is changed except by clipping; every rank makes
the same decision in the same step, because it is made from sums over the ranks.
"""
