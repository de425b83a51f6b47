"""Image generators as torch modules, written from their papers, to compare the shapes with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.recipe.generator_settings import GeneratorSettings

GROUPS = 4  # of group norms; Stable Diffusion has 32


class Attention(nn.Module):
    def __init__(self, wide: int, context: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(wide, wide, bias=bias)
        self.k, self.v = (nn.Linear(context, wide, bias=bias) for _ in range(2))
        self.out = nn.Linear(wide, wide)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        joined: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return joined


class Residual(nn.Module):
    def __init__(self, wide: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, wide), nn.Conv2d(wide, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Identity() if wide == out else nn.Conv2d(wide, out, 1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        added: Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        return added


class Transformer(nn.Module):
    def __init__(self, wide: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm, self.into, self.back = nn.GroupNorm(GROUPS, wide), nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(3))
        self.self_attention = Attention(wide, wide, heads, bias=False)
        self.cross_attention = Attention(wide, context, heads, bias=False)
        self.fc1, self.fc2 = nn.Linear(wide, 8 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        y = self.into(self.norm(x).flatten(2).transpose(1, 2))
        normed = self.norms[0](y)
        y = y + self.self_attention(normed, normed)
        y = y + self.cross_attention(self.norms[1](y), context)
        value, gate = self.fc1(self.norms[2](y)).chunk(2, dim=-1)
        y = y + self.fc2(value * F.gelu(gate))
        added: Tensor = x + self.back(y).transpose(1, 2).reshape(x.shape)
        return added


class Plain(nn.Module):
    """A module that reads neither timestep nor context."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        out: Tensor = self.parts(x)
        return out


class UNet(nn.Module):
    def __init__(self, g: GeneratorSettings, llm_hidden: int) -> None:
        super().__init__()
        first = g.widths[0]
        last = len(g.widths) - 1
        self.context = nn.Linear(llm_hidden, g.context_width)
        self.embed = nn.ModuleList([nn.Conv2d(g.channels, first, 3, padding=1)])
        self.embed += [nn.Linear(first, 4 * first), nn.Linear(4 * first, 4 * first)]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width = first
        widths = [first]
        for level, wide in enumerate(g.widths):
            for _ in range(g.layers):
                self.down.append(self._block(g, level, width, level < last))
                widths.append(width := wide)
            if level < last:
                self.down.append(Plain(nn.Conv2d(width, width, 3, stride=2, padding=1)))
                widths.append(width)
        self.middle = nn.ModuleList([self._block(g, last, width, True), self._block(g, last, width, False)])
        for level in range(last, -1, -1):
            for _ in range(g.layers + 1):
                self.up.append(self._block(g, level, width + widths.pop(), level < last))
                width = g.widths[level]
            if level:
                self.up.append(Plain(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)))
        self.out = nn.Sequential(nn.GroupNorm(GROUPS, first), nn.SiLU(), nn.Conv2d(first, g.channels, 3, padding=1))

    def _block(self, g: GeneratorSettings, level: int, width: int, attends: bool) -> nn.ModuleList:
        wide = g.widths[level]
        parts = [Residual(width, wide, 4 * g.widths[0])]
        return nn.ModuleList([*parts, Transformer(wide, g.context_width, g.heads[level])] if attends else parts)

    def forward(self, noise: Tensor, rows: Tensor) -> Tensor:
        conv, fc1, fc2 = self.embed
        context = self.context(rows)
        x = conv(noise)
        time = fc2(F.silu(fc1(torch.zeros(len(noise), fc1.in_features))))
        skips = [x]
        for block in self.down:
            x = _through(block, x, time, context)
            skips.append(x)
        for block in self.middle:
            x = _through(block, x, time, context)
        for block in self.up:
            if isinstance(block, nn.ModuleList):
                x = torch.cat([x, skips.pop()], dim=1)
            x = _through(block, x, time, context)
        out: Tensor = self.out(x)
        return out


def _through(block: nn.Module, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
    for part in block if isinstance(block, nn.ModuleList) else [block]:
        x = part(x, time, context)
    return x


class DitBlock(nn.Module):
    def __init__(self, wide: int, context: int, heads: int) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = (
            Attention(wide, wide, heads, bias=True),
            Attention(wide, context, heads, bias=True),
        )
        self.fc1, self.fc2 = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)
        self.table = nn.Parameter(torch.randn(6, wide))

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (self.table + time).unsqueeze(2).unbind(1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + gate * self.self_attention(normed, normed)
        x = x + self.cross_attention(x, context)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(normed), approximate="tanh"))


class Dit(nn.Module):
    def __init__(self, g: GeneratorSettings, llm_hidden: int) -> None:
        super().__init__()
        (wide,), (heads,), pixels = g.widths, g.heads, g.channels * g.patch**2
        self.context = nn.Linear(llm_hidden, g.context_width)
        self.embed = nn.ModuleList(nn.Linear(*sides) for sides in ((pixels, wide), (256, wide), (wide, wide)))
        self.modulation = nn.Linear(wide, 6 * wide)
        self.blocks = nn.ModuleList(DitBlock(wide, g.context_width, heads) for _ in range(g.layers))
        self.table, self.out = nn.Parameter(torch.randn(2, wide)), nn.Linear(wide, 2 * pixels)

    def forward(self, patches: Tensor, rows: Tensor) -> Tensor:
        linear, fc1, fc2 = self.embed
        context = self.context(rows)
        x = linear(patches)
        time = fc2(F.silu(fc1(torch.zeros(len(patches), fc1.in_features))))
        modulation = self.modulation(F.silu(time)).unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, modulation, context)
        shift, scale = self.table.unbind(0)
        out: Tensor = self.out(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        return out
