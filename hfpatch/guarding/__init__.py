"""The training guard: a bad batch is skipped, reported and counted, and a run that cannot continue is stopped.

    outcome.py          Reason, Facts, Outcome: the result for a batch, as plain values
    gradient_norms.py   norms in float32 of plain, half-precision and sharded gradients; clipping
    judge.py            the decision: losses and gradients of one window of micro-batches -> step or skip, on the
                        device, with the running median. Knows no optimizer and no Trainer
    ledger.py           the host's part of the decision: reasons, counters, history, and when to stop
    checks.py           errors and warnings before the first step
    guard.py            Guard: steps optimizer, scaler and schedule of a plain loop by the decision
    recorder.py         the interface of a black box (`hfpatch.BlackBox`)
    callback.py         GuardCallback: the same inside a transformers Trainer, on that Trainer's own objects only

    hazards.py          `hfpatch.check`, with hazard.py, subject.py, settings.py, precision.py and forwards.py
    helpers.py          `validate_loss` and `gradient_report`, for your own training loop

Rules that hold everywhere: gradients are judged unscaled and before clipping; a skipped batch changes neither weights
nor optimizer state nor schedule; no loss is replaced and no gradient is changed except by clipping; every rank makes
the same decision in the same step, because it is made from sums over the ranks.
"""
