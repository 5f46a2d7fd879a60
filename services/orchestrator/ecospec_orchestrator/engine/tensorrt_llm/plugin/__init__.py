"""What runs inside TensorRT-LLM's executor, on every rank: node selection, draft lengths, router capture, and their installation.

Torch, numpy and the standard library only, and of this project what needs no more; nothing here imports tensorrt_llm before
install.py is told to. So it can be imported, and tested, where TensorRT-LLM is not installed.
"""
