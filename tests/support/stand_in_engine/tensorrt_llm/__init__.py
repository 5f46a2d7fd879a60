"""Not TensorRT-LLM: a stand-in with the few names that EcoSpec relies on, which drafts, verifies and routes on the CPU.

Its target continues token t with after(t); its tree worker keeps the candidates of one step as documented, reads a choice of nodes by
brute force, and refuses one that breaks the contract.
"""
