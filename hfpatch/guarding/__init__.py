"""The training guard: a bad batch is skipped whole, named, counted, and a run that cannot go on is stopped.

    outcome.py    Reason, Facts, Outcome: what became of a batch, as plain values
    norms.py      norms in float32 of plain, half-precision and sharded gradients, in one all-reduce; clipping
    judge.py      the decision: losses and gradients of one window of micro-batches -> step or skip, on the device,
                  with the running median. Knows no optimizer and no Trainer
    ledger.py     the host's side of it: reasons, counters, history, and when to stop
    checks.py     what is refused, or warned about, before the first step
    guard.py      Guard: drives optimizer, scaler and schedule of a plain loop by the decision
    recorder.py   what is asked of a black box (`hfpatch.BlackBox`), and when
    callback.py   GuardCallback: does the same inside a transformers Trainer, on that Trainer's own objects only

Rules that hold everywhere: gradients are judged unscaled and before clipping; a skipped batch changes neither
weights nor optimizer state nor schedule; no loss is replaced, no gradient is repaired; every rank takes the same
decision in the same step, because the decision is made from numbers that were summed over the ranks.
"""
