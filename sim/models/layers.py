"""What Keras's networks are made of and torch lacks: its BatchNorm and its initial weights."""

import math

import torch
from torch import nn
from torch.nn import functional

TRUNCATED_STD = 0.87962566103423978  # of a standard normal cut at -2 and 2


class KerasBatchNorm2d(nn.Module):
    """BatchNorm with Keras's running statistics.

    The running variance follows the biased variance of the minibatch (divided by n, where torch
    divides by n - 1), and there is no counter of minibatches.

    Parameters
    ----------
    num_features : int
        Channels.
    eps : float
        Added to the variance.
    momentum : float
        Share of a minibatch in the running statistics: 1 minus Keras's momentum.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, num_features: int, eps: float = 1.001e-5, momentum: float = 0.01) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize float32 [batch, channel, height, width]; in training by its own statistics."""
        # Copies, because autograd holds on to what batch_norm has updated.
        mean, variance = self.running_mean.clone(), self.running_var.clone()
        outputs = functional.batch_norm(
            inputs,
            mean,
            variance,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        if self.training:
            with torch.no_grad():
                # variance is kept + momentum * n / (n - 1) * biased; take that factor out.
                kept = (1 - self.momentum) * self.running_var
                self.running_mean.copy_(mean)
                self.running_var.copy_(variance.lerp(kept, inputs.shape[1] / inputs.numel()))
        return outputs

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer."""
        return f"{len(self.weight)}, eps={self.eps}, momentum={self.momentum}"


class GlorotConv2d(nn.Conv2d):
    """A convolution whose first weights are Glorot uniform, as in Keras; its bias is zero."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        draw_glorot(self)


class HeConv2d(nn.Conv2d):
    """A convolution whose first weights are Keras's ``he_normal``: normal, cut at 2 deviations."""

    def reset_parameters(self) -> None:
        """Draw the weights, of variance 2 / fan-in."""
        fan_in = self.weight[0].numel()
        std = math.sqrt(2 / fan_in) / TRUNCATED_STD
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class GlorotLinear(nn.Linear):
    """A linear layer whose first weights are Glorot uniform, as in Keras; its bias is zero."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        draw_glorot(self)


def draw_glorot(layer: nn.Conv2d | nn.Linear) -> None:
    """Draw Glorot uniform weights for a layer, and set its bias to zero."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
