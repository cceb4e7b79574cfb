"""For authors of patches and libraries: tiny models, inputs for them, and a check of a patch against its own cases."""

from hfpatch.lab.example import example_inputs as example_inputs
from hfpatch.lab.tiny import SpeechLLM as SpeechLLM
from hfpatch.lab.tiny import tiny_model as tiny_model
from hfpatch.patching.verifying.proving import CaseResult as CaseResult
from hfpatch.patching.verifying.proving import CaseResults as CaseResults
from hfpatch.patching.verifying.proving import prove_patch as prove_patch
