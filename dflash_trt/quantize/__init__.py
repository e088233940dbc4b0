"""Weight formats of an engine: what is quantized, how, and packing."""
