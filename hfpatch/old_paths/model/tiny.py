"""Where models pickled with release 0.1 look for these names."""

from hfpatch.lab.tiny import SpeechLLM as SpeechLLM
