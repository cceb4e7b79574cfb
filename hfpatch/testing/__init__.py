"""For authors of patches and libraries: tiny models with inputs for them, and the proof of a patch's own cases."""

from hfpatch.lab.example import example_inputs as example_inputs
from hfpatch.lab.tiny import SpeechLLM as SpeechLLM
from hfpatch.lab.tiny import tiny_model as tiny_model
from hfpatch.patching.verifying.proving import CaseResult as CaseResult
from hfpatch.patching.verifying.proving import prove_patch as prove_patch
