"""TensorRT-LLM as the engine: it batches and decodes, this package starts it, feeds it and reads what it measures."""
