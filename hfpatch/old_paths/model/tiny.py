"""Names that models pickled with release 0.1 refer to."""

from hfpatch.lab.tiny import SpeechLLM as SpeechLLM
