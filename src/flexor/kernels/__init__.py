"""Triton kernels, the operators of torch that call them, and the same computed by torch.

Triton is imported with the first call of an operator: `triton/` has its code, and nothing else imports it.
"""
