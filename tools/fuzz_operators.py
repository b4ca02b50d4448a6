"""The building blocks of programs in fuzz_gradients.py: a line for each form, as people write them.

A line has the ranks that `h` may have, then Python. `h` is the value so far, `other` one that
broadcasts with it, `row` and `number` are trained, `fixed` is a buffer, `mask` and `ids` are inputs
with a value for each row. Braces mark random parts: {d} a dimension, {ds} several, {b} a boolean,
{k} 1 to 3, {a} a number, {p} a positive one, {e} an exponent, {i} 0 or -1, {L:...} a layer of the
model.
"""

FORMS = """
# Arithmetic, also of shapes that are broadcast
0-4 | h + other
0-4 | h - other * {a}
0-4 | other - h
0-4 | h * other
0-4 | other * h.sigmoid()
0-4 | h / (other.square() + {p})
0-4 | other / (h.exp() + {p})
0-4 | h * number + number
1-4 | h * row
1-4 | row - h / row.exp()
1-4 | h * fixed + fixed
0-4 | {a} - h
0-4 | {a} / (h.abs() + 0.5)
0-4 | h * (h.detach() // {p})
0-4 | h * (h.detach() // (other.detach() - {p}))
0-4 | h * ((h * 9).long() // 2)
0-4 | h * torch.div(h.detach(), {p}, rounding_mode="floor")
0-4 | torch.add(h, other, alpha={a})
0-4 | torch.sub(h, other, alpha={a})
0-4 | torch.rsub(h, other, alpha={a})
0-4 | torch.addcmul(h, h, other, value={a})
0-4 | torch.addcdiv(h, other, h.exp() + 1, value={a})
0-4 | torch.lerp(h, other, {p})
0-4 | torch.lerp(h, other, number)
0-4 | h ** {e}
0-4 | (h.abs() + 0.1) ** {a}
0-4 | (h.abs() + 0.1) ** number
0-4 | (h.abs() + 0.1).pow(other)
1-4 | (h.abs() + 0.1) ** fixed.abs()
1-4 | (h.mean({d}, keepdim=True).abs() + 0.5) ** fixed.abs()
0-4 | {p} ** h
0-4 | torch.exp2(h)
0-4 | torch.float_power(h.abs() + 0.1, {a}).float()
0-4 | h * h
0-4 | h / h.detach().abs().clamp(min=0.1)
0-4 | h + h + h.neg()
0-4 | (h * 3).remainder(2.0)
0-4 | torch.fmod(h, 0.7)
0-4 | torch.hypot(h, other + 2)
0-4 | torch.atan2(h, other.abs() + 1)
0-4 | torch.maximum(h, other)
0-4 | torch.minimum(other, h)
0-4 | torch.maximum(h, torch.zeros(()))
0-4 | torch.fmax(h, other)
0-4 | torch.logaddexp(h, other)
0-4 | torch.xlogy(h.abs(), other.abs() + 0.1)
0-4 | torch.where(h > 0, h, other)
0-4 | torch.where(h > {a}, {a}, h)
0-4 | torch.where(other > h, number, h)
1-4 | torch.where(fixed > 0, row, h)
0-4 | h.masked_fill(h < 0, {a})
0-4 | h * (h > 0) + h * (other > 0).float() * 2
0-4 | h * (other > 0).long()
0-4 | h + torch.ones((), dtype=torch.float64)
1-4 | (h * fixed.double()).float()
# Functions of one value
0-4 | h.exp()
0-4 | (h.abs() + 0.1).log()
0-4 | torch.log1p(h.abs() * 1e-4) * 1e4
0-4 | torch.expm1(h * 1e-4) * 1e4
0-4 | (h.square() + 0.1).sqrt()
0-4 | torch.where(h > 0, h.clamp(min=0).sqrt(), h)
0-4 | (h.abs() + 0.1).rsqrt()
0-4 | (h + 3).reciprocal()
0-4 | h.abs()
0-4 | h.sign() * h
0-4 | h.sin() + h.cos()
0-4 | (h * 0.3).tan()
0-4 | h.tanh().atan()
0-4 | (h.tanh() * 0.9).asin() + (h.tanh() * 0.9).acos()
0-4 | h.sinh() + h.cosh()
0-4 | h.erf()
0-4 | h.square().square()
0-4 | h.floor() + h
0-4 | h.round() * h
0-4 | h + (h.round() - h).detach()
0-4 | h.long().float() * h
0-4 | h.frac()
0-4 | torch.nan_to_num(h, {a})
0-4 | torch.special.expit(h).logit()
0-4 | torch.lgamma(h.abs() + 1)
0-4 | h.clamp({a}, {a} + 1)
0-4 | h.clamp(min={a})
0-4 | h.clamp(max=other.abs())
0-4 | h.clamp(min=number)
0-4 | h.clamp(torch.zeros(()), number.exp())
0-4 | (h * 60).sigmoid()
0-4 | F.relu(h) + F.relu6(h * 4)
0-4 | F.leaky_relu(h, {a})
0-4 | F.elu(h, {p}) + F.celu(h, {p}) + F.selu(h)
0-4 | F.gelu(h) + F.gelu(h, approximate="tanh")
0-4 | 0.5 * h * (1 + torch.erf(h / 1.4142135))
0-4 | 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h ** 3)))
0-4 | 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.05 * h ** 3)))
0-4 | h * torch.sigmoid(1.702 * h)
0-4 | h * torch.sigmoid(h * {a})
0-4 | F.silu(h) + F.mish(h)
0-4 | F.softplus(h, {p}, 2.0)
0-4 | F.logsigmoid(h * 90)
0-4 | h.sigmoid().log()
0-4 | F.hardswish(h * 4) + F.hardsigmoid(h * 4)
0-4 | F.hardshrink(h) + F.softshrink(h, 0.3) + F.tanhshrink(h)
0-4 | F.threshold(h, {a}, {a})
0-4 | F.softsign(h)
0-4 | F.prelu(h, number.reshape(1)) if h.dim() else h
1-4 | F.gelu(h + row)
1-4 | F.gelu(h.mean(-1, keepdim=True) + row)
1-4 | F.dropout(h, 0.5, training=False)
0-4 | torch.polar(h.abs() + 0.1, h).real
# At zeros, bounds and ties
0-4 | h.relu() ** {z}
1-4 | torch.stack([h.relu() ** k for k in range(3)], -1)
1-4 | h.relu().unsqueeze(-1) ** torch.arange(3)
0-4 | F.relu6(h.relu())
0-4 | F.hardtanh(h.relu(), 0.0, 1.0)
0-4 | h.relu().clamp(0, 0.5)
0-4 | h.relu().abs() + h.sign().abs() * h
0-4 | torch.maximum(h.relu(), torch.zeros(()))
0-4 | torch.maximum(h.relu(), (-h).relu())
0-4 | F.hardshrink(h.relu()) + F.leaky_relu(h.relu(), 0.2) + F.threshold(h.relu(), 0.0, 1.0)
0-4 | torch.xlogy(h.relu(), h.relu().detach())
0-4 | torch.special.entr(h.relu() + 0.01)
1-4 | h.relu().norm(dim={d})
0-4 | h.relu().sqrt()
0-4 | h.clamp(min=0).sqrt()
0-4 | h.clamp(max=0).neg().sqrt()
0-4 | torch.maximum(h, torch.zeros(())).sqrt()
0-4 | F.leaky_relu(h, 0.0).sqrt()
0-4 | torch.where(h > 0, h, torch.zeros(())).sqrt()
0-4 | (h * (h > 0)).abs().sqrt() + h
0-4 | F.relu6(h - h.detach()) + F.hardtanh(h - h.detach() + 1)
0-4 | (h - h.detach()) ** {z}
1-4 | (h.relu() * 0 + fixed).norm(dim=-1) * h.mean()
1-4 | torch.linalg.vector_norm(h.clamp(max=0).relu(), {e}, {d})
1-4 | h.clamp(max=0).relu().norm(dim=-1) + h.mean()
1-4 | h.clamp(max=0).relu().std(-1) + h.mean()
1-4 | h.clamp(max=0).relu().var(-1) + h.mean()
1-4 | F.normalize(h.clamp(max=0).relu(), dim=-1) + h
1-4 | F.cosine_similarity(h.clamp(max=0).relu(), other, dim=-1) + h.mean()
2-2 | torch.cdist(h, h)
1-4 | h.relu() / h.relu().sum(-1, keepdim=True).clamp(min=1e-6)
1-4 | h.relu().amax(-1)
0-4 | h.relu().max()
# Over dimensions
1-4 | h.sum({d}, keepdim={b})
1-4 | h.sum({ds}, keepdim={b})
0-4 | h.sum()
1-4 | h.mean({d}, keepdim={b})
1-4 | h.mean({ds}, keepdim={b})
1-4 | h - h.mean({ds}, keepdim=True)
1-4 | h.amax({ds}, keepdim={b})
1-4 | h.max({d}, keepdim={b})[0]
1-4 | h.min({d})[0] + h.max({d})[0]
0-4 | h.max() * h
1-4 | h.logsumexp({d}, keepdim={b})
1-4 | h.logsumexp({ds})
1-4 | h.masked_fill(h < 0, float("-inf")).logsumexp({d}).clamp(min=-9)
1-4 | h.norm(dim={d}, keepdim={b})
0-4 | h.norm()
1-4 | torch.linalg.vector_norm(h, {e}, {d}, keepdim={b})
1-4 | h.norm(p=1, dim={ds})
1-4 | h.var({d}, unbiased={b}, keepdim=True) + h
1-4 | h.std({ds}, unbiased=False)
0-4 | h.var(unbiased=False)
1-4 | (h / 2).prod({d}, keepdim={b})
1-4 | h.cumsum({d})
1-4 | (h / 2).cumprod({d})
1-4 | h.flip({d}).cumsum({d}).flip({d})
1-4 | h.logcumsumexp({d})
1-4 | h.softmax({d})
1-4 | h.log_softmax({d})
1-4 | F.softmin(h, {d})
1-4 | h.softmax({d}).log()
1-4 | h.masked_fill(h < -0.5, -1e9).softmax({d})
1-4 | h.exp() / h.exp().sum({d}, keepdim=True)
1-4 | F.normalize(h, dim={d})
1-4 | F.normalize(h * (h > 0), p=1, dim={d})
1-4 | F.cosine_similarity(h, other, dim={d})
1-4 | F.pairwise_distance(h, other)
1-4 | h.topk(1, {d})[0]
1-4 | h.topk(2, -1, largest={b})[0]
1-4 | h.sort({d}, descending={b})[0]
1-4 | h.gather({d}, h.argsort({d}))
1-4 | h.kthvalue(1, {d})[0]
1-4 | h.median({d})[0]
1-4 | h * F.one_hot(h.argmax(-1), h.shape[-1])
1-4 | h.softmax(-1) + (F.one_hot(h.argmax(-1), h.shape[-1]) - h.softmax(-1)).detach()
2-4 | F.glu(h, -1)
1-4 | (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * row + fixed
2-4 | (h - h.mean(1, True)) / ((h - h.mean(1, True)).pow(2).mean(1, True) + 1e-5).sqrt() * number + 1
1-4 | (h - h.mean(-1, True)) / torch.sqrt((h - h.mean(-1, True)).pow(2).mean(-1, True) + 1e-5) * row + row
1-4 | h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * row
2-4 | h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-5) * number
1-4 | h * torch.rsqrt(h.square().sum(-1, keepdim=True) + 1e-5) * row
1-4 | row * (h / h.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=0.1))
# Shapes
1-4 | h[..., {i}]
1-4 | h[{i}]
2-4 | h[:, {i}]
2-4 | h[:, {i}:]
1-4 | h[..., ::2]
1-4 | h[..., 1:-1]
1-4 | h[..., None] * h[..., None, :]
1-4 | h.flip({d})
1-4 | h.flip({ds})
1-4 | h.roll({k}, {d})
1-4 | h.roll(-1, {d}) - h
2-4 | h.transpose({d}, {d})
2-4 | h.transpose(-1, -2) * {a}
2-2 | h.t() + 1
1-4 | h.permute(*reversed(range(h.dim())))
1-4 | h.movedim({d}, {d})
0-4 | h.reshape(-1)
1-4 | h.flatten()[: -1]
2-4 | h.flatten(0, -2)
2-4 | h.flatten(1)
2-4 | h.reshape(h.shape[0], -1)
1-4 | h.reshape(*h.shape[:-1], 2, -1)
1-4 | h.unflatten(-1, (-1, 2)).transpose(-1, -2)
1-4 | h.unsqueeze({d}).expand(*h.shape[:0], *h.unsqueeze({d}).shape) * 2
0-3 | h.unsqueeze(0).expand(3, *h.shape)
0-3 | h.expand(2, *h.shape) * other
1-4 | h[:1].expand_as(h) + h
1-4 | h.mean({d}, keepdim=True).expand_as(h)
1-4 | h.mean({d}, keepdim=True).squeeze({d})
1-4 | h.squeeze({d})
1-4 | h.squeeze()
1-4 | h.repeat(*[2] * h.dim())
1-3 | h.repeat(2, *[1] * h.dim())
1-4 | h.tile(3)
1-4 | h.repeat_interleave({k}, {d})
1-4 | h.repeat_interleave(2, -1) * h.sum()
1-4 | torch.cat([h, other.expand_as(h)], {d})
1-4 | torch.cat([h, h, h * 2], {d})
1-4 | torch.cat([h, torch.zeros_like(h), h.detach()], {d})
1-3 | torch.stack([h, h * 2], {d})
1-3 | torch.stack([h, other.expand_as(h)], -1).flatten(-2)
1-4 | h.chunk(2, -1)[{i}]
1-4 | h.chunk(3, -1)[0] * h.chunk(3, -1)[1].detach()
1-4 | torch.cat(h.chunk(4, -1)[::-1], -1)
1-4 | h.split([1, 2, h.shape[-1] - 3], -1)[1]
1-4 | h.split(2, -1)[{i}] * 2
1-4 | h.unbind(-1)[1] * h.unbind(-1)[{i}]
1-4 | h.unbind(-1)[2]
1-4 | h.tensor_split(2, -1)[0]
1-4 | h.narrow(-1, 1, 2)
1-4 | h.unfold(-1, 3, {k})
1-4 | h.diff(dim={d})
1-4 | F.pad(h, (1, 2))
1-4 | F.pad(h, (-1, 2), value={a})
2-4 | F.pad(h, (0, 0, 1, 0))
2-4 | F.pad(h, (1, 2), mode="{mode}")
1-4 | torch.atleast_2d(h).mT
2-4 | h.tril({i})
2-4 | h.triu(1) + h.tril(-1)
2-4 | h.diagonal(dim1=-2, dim2=-1)
2-4 | h.diagonal(1, -1, -2)
1-3 | torch.diag_embed(h)
1-4 | h.rot90(1, (-1, 0)) if h.dim() > 1 else h
1-1 | torch.outer(h, h)
1-2 | torch.cartesian_prod(h.flatten()[:2], h.flatten()[:3])
1-4 | h + torch.arange(h.shape[-1])
1-4 | h * torch.linspace(0, 1, 6)[: h.shape[-1]]
1-4 | h / h.shape[0] + h * h.shape[-1]
1-4 | h.new_ones(h.shape[0], *[1] * (h.dim() - 1)) * h
# Indices
1-4 | h[torch.tensor([0, -1, 0])]
1-4 | h[..., torch.tensor([1, 1, 0])]
2-4 | h[:, torch.tensor([[0, 0], [0, -1]])]
2-4 | h[torch.tensor([0, 0]), torch.tensor([0, -1])]
2-4 | h[torch.arange(h.shape[0]), h.flatten(1).argmax(1) % h.shape[1]]
3-4 | h[:, torch.tensor([0]), torch.tensor([-1])]
3-4 | h[torch.tensor([0, 0]), :, torch.tensor([1, 0])]
1-4 | h.index_select({d}, torch.tensor([0, 0]))
1-4 | h[h > 0].sum() + h.mean()
1-4 | h[h > 99].sum() + h.mean()
1-4 | h.masked_select(h > 0).square().sum() * h
1-4 | h.gather(-1, (h > 0).long())
1-4 | h.gather({d}, torch.zeros_like(h[:1]).long()) if h.dim() else h
1-4 | torch.take_along_dim(h, h.argmax({d}, keepdim=True), {d})
1-4 | h.scatter(-1, (h > 0).long()[..., :1], h[..., :1] * 2)
1-4 | h.scatter_add({d}, (h > 0).long() * 0, other.expand_as(h))
1-4 | h.scatter_reduce({d}, (h > 0).long() * 0, h * 2, "{reduce}")
1-4 | h.scatter(-1, (h > 9).long()[..., :1], {a})
1-4 | h.index_add({d}, torch.tensor([0, 0]), torch.cat([h, h], {d}).narrow({d}, 0, 2) * 2)
1-4 | h.index_copy({d}, torch.tensor([0]), h.narrow({d}, 0, 1) * 3)
1-4 | h.index_fill({d}, torch.tensor([0]), {a})
1-4 | h.index_put((torch.tensor([0, 0]),), h[:1] * 2, accumulate={b})
1-4 | h.masked_scatter(h > 0, h.detach() * 2)
1-4 | F.embedding((h.detach() > 0).long(), torch.stack([row, row * 2]))
1-4 | z = h * 2; z[0] = {a}; h = z * h
1-4 | z = h.clone(); z[..., 0] = h[..., 1] * 3; h = z
1-4 | z = h.clone(); z[..., 1:] += h[..., :-1]; h = z
1-4 | z = h.clone(); z[h > 0] = {a}; h = z
1-4 | z = torch.zeros_like(h); z[..., ::2] = h[..., ::2]; h = z
0-4 | h = h.clone().mul_(2).add_(other if other.dim() <= h.dim() and other.numel() == 1 else 1)
1-4 | q, k, v = h.chunk(3, -1); h = q * k.detach()
1-4 | q, k = h.chunk(2, -1); h = q
1-4 | q, k, v = h.split(2, -1); h = v + q.detach()
2-4 | q, k = h.reshape(*h.shape[:-1], 2, 3).unbind(-2); h = q.detach() * k
1-4 | h[..., 0] * h[..., 1].detach() + h[..., 2]
1-4 | h[..., :2] * h[..., 2:4].detach()
1-4 | h[..., 0] + h[..., 1] * 2 + h[..., 2] * 3
1-4 | torch.cat([h[:0], h * 2])
1-4 | h[:0].sum() + h
2-4 | h[mask].mean() * h
2-4 | h[mask & False].sum() + h
2-4 | h[mask] * 2
3-4 | h.masked_fill(~mask.unsqueeze(-1), 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
3-3 | (h * mask.unsqueeze(-1)).sum(1) / mask.float().sum(1).clamp(min=1).unsqueeze(-1)
2-4 | h[ids.flatten() % h.shape[0]]
2-4 | torch.stack([row, row * 2, fixed])[ids % 3] * h
1-4 | with torch.no_grad(): z = h * 2; h = h + z
1-4 | z = h; h = h * 2; h = h + z * z
# Products
1-4 | F.linear(h, self.first.weight.t()) + F.linear(h, self.second.weight)
1-4 | self.first(h) * self.second(h) + self.first(h)
1-4 | h @ self.first.weight * self.second.bias
1-4 | h @ torch.outer(row, row)
1-4 | h @ row
1-4 | row @ torch.outer(row, row) * h
2-4 | h @ h.transpose(-1, -2)
2-4 | h.transpose(-1, -2) @ h
3-4 | h.transpose(0, 1) @ torch.outer(row, row)
2-4 | (h @ torch.outer(row, fixed))[..., 0]
2-4 | (h @ torch.outer(row, fixed))[:, {i}]
2-4 | (h @ torch.outer(row, fixed))[:, 0:1]
2-4 | (h @ torch.outer(row, fixed)).flatten(0, -2)[0]
2-4 | (h + row)[:, {i}]
2-4 | (h.softmax({d}) * number)[:, 0]
2-4 | (h.transpose(0, 1) + row)[{i}]
3-4 | (h + h.mean(1, keepdim=True)).flatten(0, 1)
3-4 | (h * h.mean(0, keepdim=True)).reshape(-1, h.shape[-1])
3-4 | ({L:nn.LayerNorm(6)}(h) + h[:, :1])[:, 0]
3-3 | torch.bmm(h, h.transpose(1, 2)).softmax(-1) @ h
3-3 | torch.baddbmm(h[:, :, :1], h, h.transpose(1, 2), beta={a}, alpha={p})
2-2 | torch.addmm(row, h, torch.outer(row, row), beta={a}, alpha={p})
2-2 | torch.addmm(h[:1], h, torch.outer(row, row))
2-2 | torch.addmm(number, h, torch.outer(row, fixed))
2-2 | torch.addmv(h[:, 0], h, row)
1-1 | torch.dot(h, h) + h
2-4 | F.linear(h, torch.outer(row, row), fixed * number)
1-4 | F.linear(h, self.second.weight) + row
1-4 | row.exp() + F.linear(h, self.second.weight)
1-4 | F.linear(h, self.second.weight.t(), row) + row * number
2-4 | {L:nn.Linear(6, 6)}(h) + fixed + row
2-4 | (F.linear(h, self.second.weight) + row).relu() + F.linear(h, self.first.weight) * row
2-2 | h.t() @ (h @ self.first.weight + row)
2-2 | (h.t() @ h).t() + row
2-4 | {L:nn.Linear(6, 6, bias=False)}(h).mean(-1, keepdim=True) + row
2-4 | h = (h.tanh() + h.mean({d}, keepdim=True))[:, {i}]; h = h * h.tanh()
2-4 | h = (h / h.exp().mean(-1, keepdim=True))[..., {i}]; h = h + h.tanh()
3-4 | (h + h.tanh().mean(0))[:, {i}]
3-4 | (h.mean(0) + h)[:, -1:]
3-4 | (h / h.exp().mean(0))[..., :2]
2-4 | torch.einsum("...i,ij->...j", h, torch.outer(row, row))
2-2 | torch.einsum("bi,bi->b", h, h)
2-2 | torch.einsum("bi,ij,bj->b", h, torch.outer(row, row), h)
2-2 | torch.einsum("bi,cj->bicj", h, h)
2-2 | torch.einsum("bi->ib", h)
2-2 | torch.einsum("bi,i->", h, row)
2-2 | torch.einsum("ij,kj->ik", h, h)
3-3 | torch.einsum("bti,bsi->bts", h, h)
3-3 | torch.einsum("bti,bsi->tb", h, h)
3-3 | torch.einsum("bti,bti->t", h, h)
3-3 | torch.einsum("bti,bi->bt", h, h.mean(1))
3-3 | torch.einsum("bti,ti->bi", h, h[0])
3-3 | torch.einsum("bti,ij,j->bt", h, torch.outer(row, row), row)
3-3 | torch.einsum("btt->bt", torch.bmm(h, h.mT))
4-4 | torch.einsum("bhqd,bhkd->bhqk", h, h)
4-4 | torch.einsum("bhqd,hd->bqh", h, h[0].mean(1))
2-4 | torch.tensordot(h, torch.outer(row, row), 1)
2-2 | torch.kron(h, h[:1])
2-2 | torch.cdist(h, h[:1] + 1)
2-3 | torch.linalg.matrix_norm(h)
2-4 | torch.cross(h[..., :3], other.expand_as(h)[..., :3], dim=-1)
# Layers
1-4 | {L:nn.Linear(6, 6)}(h)
2-4 | {L:nn.Linear(6, 1)}(h).squeeze(-1)
2-4 | {L:nn.Linear(6, 6, bias=False)}(h)[:, 0]
2-4 | {L:nn.LayerNorm(6)}(h)
2-4 | {L:nn.LayerNorm(6, bias=False)}(h) + {L:nn.LayerNorm(6, elementwise_affine=False)}(h)
1-4 | {L:nn.RMSNorm(6)}(h)
2-2 | {L:nn.BatchNorm1d(6)}(h)
2-2 | {L:nn.BatchNorm1d(6, affine=False)}(h)
2-2 | {L:nn.BatchNorm1d(6, track_running_stats=False)}(h)
2-2 | {L:nn.BatchNorm1d(6).eval()}(h)
3-3 | {L:nn.BatchNorm1d(6)}(h.transpose(1, 2)).transpose(1, 2)
2-2 | {L:nn.GroupNorm(2, 6)}(h)
3-3 | {L:nn.GroupNorm(3, 6)}(h.mT)
3-3 | {L:nn.GroupNorm(3, 6, affine=False)}(h.mT)
3-3 | {L:nn.Conv1d(6, 6, 3, padding=1)}(h.mT).mT
3-3 | {L:nn.Conv1d(6, 6, 2, dilation=2, groups=3)}(F.pad(h.mT, (2, 0))).mT
3-3 | {L:nn.Conv1d(6, 4, 1, bias=False)}(h.mT).mean(-1)
3-3 | {L:nn.GRU(6, 4, batch_first=True)}(h)[0]
3-3 | {L:nn.GRU(6, 4, batch_first=True)}(h)[1][0]
3-3 | {L:nn.LSTM(6, 4, batch_first=True)}(h)[0][:, -1]
3-3 | {L:nn.LSTM(6, 4, batch_first=True)}(h)[1][1][0]
3-3 | {L:nn.LSTM(6, 4, 2, bias=False, batch_first=True)}(h)[0]
3-3 | {L:nn.LSTM(6, 4)}(h, (h[:1, :, :4], h[-1:, :, 2:]))[0]
2-2 | {L:nn.LSTMCell(6, 4)}(h)[0]
2-2 | {L:nn.GRU(6, 4)}(h)[0]
3-3 | {L:nn.MultiheadAttention(6, 2, batch_first=True)}(h, h, h)[0]
3-3 | F.scaled_dot_product_attention(h, h, h, is_causal={b})
3-3 | F.scaled_dot_product_attention(h, h, h, attn_mask=mask[:, None])
2-3 | {L:nn.Embedding(6, 6, padding_idx=0)}(ids) * h
2-3 | {L:nn.EmbeddingBag(6, 6, mode="sum")}(ids.reshape(len(ids), -1)) + h.flatten(1).mean()
4-4 | {L:nn.Conv2d(4, 4, 3, padding=1)}(h)
4-4 | {L:nn.Conv2d(4, 6, 3, stride=2, bias=False)}(h)
4-4 | {L:nn.Conv2d(4, 4, 3, padding="same", groups=4, padding_mode="reflect")}(h)
4-4 | {L:nn.Conv2d(4, 4, (1, 3), dilation=2, padding=2)}(h)
4-4 | {L:nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1, groups=2)}(h)
4-4 | F.conv2d(h, h[:2, :, :2, :2])
4-4 | {L:nn.BatchNorm2d(4)}(h)
4-4 | {L:nn.InstanceNorm2d(4, affine=True)}(h)
4-4 | {L:nn.Conv2d(4, 4, 3)}(h[0])
4-4 | F.avg_pool2d(h, 3, 2, 1, {b}, {b})
4-4 | F.avg_pool2d(h, 2, divisor_override=3)
4-4 | F.avg_pool2d(h[0], 2)
4-4 | F.max_pool2d(h, 3, 2, 1, 1, {b})
4-4 | F.max_pool2d(h, 2, 1, 0, 2)
4-4 | F.max_pool2d(h[0], 2)
4-4 | F.adaptive_avg_pool2d(h, 1) * h
4-4 | F.adaptive_avg_pool2d(h[0], 1)
4-4 | F.adaptive_avg_pool2d(h, (2, 3))
4-4 | F.adaptive_max_pool2d(h, 1).flatten(1)
4-4 | F.lp_pool2d(h.abs() + 0.1, 2.0, 2)
3-3 | F.max_pool1d(h.mT, 2) if h.shape[1] > 1 else h
3-3 | F.avg_pool1d(h, 3, 2, 1)
3-3 | F.adaptive_avg_pool1d(h, 1)
4-4 | F.interpolate(h, scale_factor={s}, mode="{up}")
4-4 | F.interpolate(h, size=(5, 7), mode="{up}")
4-4 | F.interpolate(h, scale_factor={s}, mode="bilinear", align_corners={b})
4-4 | F.interpolate(h, scale_factor={s}, mode="bicubic", align_corners={b})
3-3 | F.interpolate(h, scale_factor={s}, mode="nearest")
4-4 | F.pixel_shuffle(h, 2)
4-4 | F.unfold(h, 2, padding=1)
4-4 | F.local_response_norm(h, 2)
4-4 | h.mean((2, 3))
4-4 | h.sum((-1, -2), keepdim=True) * h
# Losses
0-4 | F.mse_loss(h, other.detach().expand_as(h), reduction="{r}")
0-4 | F.l1_loss(h, h.detach() * (h > 0), reduction="{r}")
0-4 | F.smooth_l1_loss(h * 3, other.expand_as(h), reduction="{r}", beta={p})
0-4 | F.huber_loss(h * 3, other.expand_as(h), reduction="{r}", delta={p})
0-4 | F.binary_cross_entropy(h.sigmoid(), (h > 0).float(), reduction="{r}")
0-4 | F.binary_cross_entropy((h * 99).sigmoid(), (other.expand_as(h) > 0).float(), reduction="{r}")
1-4 | F.binary_cross_entropy_with_logits(h * 60, (other.expand_as(h) > 0).float(), pos_weight=fixed.abs())
1-4 | F.cross_entropy(h.flatten(0, -2), h.flatten(0, -2).argmin(-1), reduction="{r}") if h.dim() > 1 else h
2-2 | F.cross_entropy(h, (h > 0).sum(-1).clamp(max=h.shape[-1] - 1), fixed.abs(), reduction="{r}", label_smoothing=0.1)
2-2 | F.cross_entropy(h, (h > 0).long()[:, 0] * -100, reduction="sum")
2-2 | F.cross_entropy(h, h.detach().softmax(-1), reduction="{r}")
3-4 | F.cross_entropy(h, (h > 0).long()[:, 0], reduction="{r}", ignore_index={i})
1-1 | F.cross_entropy(h, torch.tensor(0))
2-2 | F.nll_loss(h.log_softmax(-1), (h > 0).long()[:, 0], fixed.abs(), reduction="{r}", ignore_index=1)
3-4 | F.nll_loss(h.log_softmax(1), (h > 0).long()[:, 0])
0-4 | F.kl_div(h.sigmoid().log(), h.detach().relu(), reduction="{r}")
1-4 | F.kl_div(h.log_softmax(-1), h.detach().log_softmax(-1), log_target=True, reduction="batchmean")
0-4 | F.soft_margin_loss(h, h.detach().sign(), reduction="{r}")
2-2 | F.triplet_margin_loss(h, h.roll(1, 0), h.flip(0) * 2)
2-2 | F.cosine_embedding_loss(h, h.flip(-1), (h[:, 0] > 0) * 2.0 - 1)
1-4 | F.margin_ranking_loss(h, h.flip(-1), torch.ones_like(h), margin={p}, reduction="{r}")
0-4 | F.hinge_embedding_loss(h, h.detach().sign(), reduction="{r}")
0-4 | F.gaussian_nll_loss(h, other.detach().expand_as(h), h.square() + 0.1)
0-4 | F.poisson_nll_loss(h, h.detach().exp(), full={b})
"""
