"""Facts about every architecture of transformers, from its default config."""
