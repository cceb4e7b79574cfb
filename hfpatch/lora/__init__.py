"""LoRA: which layers an adapter should reach, by structure, and the config PEFT turns into exactly that."""
