"""Adam in one pass over weights, gradients, both averages and the bfloat16 copies of the weights."""

from flexor.kernels.operator import define_operator

define_operator(
    "adam_with_copies",
    "(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] squares, Tensor(d!)[] copies, "
    "Tensor factors, Tensor? scale, float one_minus_beta1, float one_minus_beta2, "
    "float eps, float decay) -> ()",
    lambda *_: None,
    "adam",
)
