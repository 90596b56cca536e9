"""What combined strategies must compute, replica by replica, in plain NumPy float64.

Written from the mathematics and sharing no code with the library: loops over replicas
and steps instead of collectives and transformations. The layout is a mesh
``replica x shard``; features with parameters of their own work over ``replica``.
"""

import math

import numpy as np

RATE, MOMENTUM = 0.1, 0.9
MERGE, LOCAL_STEPS, BEGIN = 2, 2, 1
LIMIT = 0.5
KEPT = 0.5  # dgc sends half of each tensor
COEFF, LARS_DECAY = 0.2, 0.02
B1, B2, EPS, LAMB_DECAY = 0.9, 0.999, 1e-8, 0.03
INIT_K, MAX_K = 2, 4
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.8
LOCAL = {"localsgd", "adaptive_localsgd"}


def norm(tree):
    return math.sqrt(sum(float(np.sum(x * x)) for x in tree.values()))


def scaled(tree, factor):
    return {key: x * factor for key, x in tree.items()}


def mean(trees):
    return {key: sum(t[key] for t in trees) / len(trees) for key in trees[0]}


def fp16_mean(trees, scale):
    """Sum of cast(g / N) in float16, as on the wire, of gradients times ``scale``."""
    out = {}
    for key in trees[0]:
        total = np.zeros_like(trees[0][key], np.float16)
        for tree in trees:
            total = total + (tree[key] * scale / len(trees)).astype(np.float16)
        out[key] = total.astype(np.float64) / scale
    return out


def clip(tree, limit):
    length = norm(tree)
    return scaled(tree, min(1.0, limit / length) if length else 1.0)


class Replica:
    """Parameters and optimizer state of one replica."""

    def __init__(self, params):
        self.w = {key: np.array(x, np.float64) for key, x in params.items()}
        zeros = {key: np.zeros_like(x) for key, x in self.w.items()}
        self.m, self.v = dict(zeros), dict(zeros)
        self.t = 0

    def step(self, names, g):
        self.t += 1
        for key, w in self.w.items():
            if "lars" in names:
                self.w[key] = w + self._lars(key, w, g[key])
            elif "lamb" in names:
                self.w[key] = w + self._lamb(key, w, g[key])
            else:
                self.m[key] = MOMENTUM * self.m[key] + g[key]
                self.w[key] = w - RATE * self.m[key]

    def _lars(self, key, w, g):
        length, pull = np.linalg.norm(w), np.linalg.norm(g)
        local = RATE
        if length and pull:
            local = RATE * COEFF * length / (pull + LARS_DECAY * length)
        self.m[key] = MOMENTUM * self.m[key] + local * (g + LARS_DECAY * w)
        return -self.m[key]

    def _lamb(self, key, w, g):
        self.m[key] = B1 * self.m[key] + (1 - B1) * g
        self.v[key] = B2 * self.v[key] + (1 - B2) * g * g
        mhat = self.m[key] / (1 - B1**self.t)
        vhat = self.v[key] / (1 - B2**self.t)
        r = mhat / (np.sqrt(vhat) + EPS) + LAMB_DECAY * w
        length, size = np.linalg.norm(w), np.linalg.norm(r)
        trust = length / size if length and size else 1.0
        return -RATE * trust * r

    def dgc_send(self, g):
        """Accumulate a local gradient; return what is sent."""
        sent = {}
        for key in g:
            self.m[key] = MOMENTUM * self.m[key] + g[key]
            self.v[key] = self.v[key] + self.m[key]
            count = max(1, math.ceil(self.v[key].size * (1 - KEPT)))
            order = np.argsort(-np.abs(self.v[key]).ravel(), kind="stable")[:count]
            mask = np.zeros(self.v[key].size, bool)
            mask[order] = True
            mask = mask.reshape(self.v[key].shape)
            sent[key] = np.where(mask, self.v[key], 0)
            self.v[key] = np.where(mask, 0, self.v[key])
            self.m[key] = np.where(mask, 0, self.m[key])
        return sent


class Run:
    """A run with some features on; ``micro`` takes one call of every replica."""

    def __init__(self, names, params, num_replicas, scale=1.0):
        self.names = set(names)
        self.replicas = [Replica(params) for _ in range(num_replicas)]
        self.scale = scale
        self.window, self.t = [], 0
        self.last, self.k, self.first_loss = BEGIN, INIT_K, None
        self.anchor = {key: np.array(x, np.float64) for key, x in params.items()}
        self.speed = {key: np.zeros_like(x) for key, x in self.anchor.items()}

    def micro(self, grads, losses):
        """``grads[replica][shard]`` is a tree, ``losses[replica]`` a number."""
        self.window.append(grads)
        if "gradient_merge" in self.names and len(self.window) < MERGE:
            return
        merged = [
            [mean([call[r][s] for call in self.window]) for s in range(len(shards))]
            for r, shards in enumerate(self.window[0])
        ]
        self.window = []
        if "amp" in self.names and not all(
            np.isfinite(x).all() for row in merged for g in row for x in g.values()
        ):
            return  # the whole window is void, everywhere
        self.t += 1
        if self.names & (LOCAL | {"dgc"}):
            mean_of = self._mean("fp16_allreduce" in self.names)
            alone = [mean_of(shards) for shards in merged]
        else:
            mean_of = self._mean("fp16_allreduce" in self.names)
            alone = [mean_of([g for row in merged for g in row])] * len(merged)
        if "dgc" in self.names:
            self._dgc(alone)
            return
        for replica, g in zip(self.replicas, alone, strict=True):
            replica.step(self.names, clip(g, LIMIT) if "clip" in self.names else g)
        if self.names & LOCAL:
            self._meet(losses)

    def _mean(self, narrow):
        return (lambda trees: fp16_mean(trees, self.scale)) if narrow else mean

    def _dgc(self, grads):
        count = len(self.replicas)
        if "clip" in self.names:
            # |g / N| is limited to c / sqrt(N).
            grads = [clip(g, LIMIT * math.sqrt(count)) for g in grads]
        pairs = zip(self.replicas, grads, strict=True)
        step = mean([replica.dgc_send(g) for replica, g in pairs])
        for replica in self.replicas:
            replica.w = {key: w - RATE * step[key] for key, w in replica.w.items()}

    def _outer(self, middle):
        """Nesterov momentum on what the replicas moved on average (DiLoCo)."""
        for key, old in self.anchor.items():
            moved = old - middle[key]
            self.speed[key] = OUTER_MOMENTUM * self.speed[key] + moved
            step = OUTER_MOMENTUM * self.speed[key] + moved
            self.anchor[key] = old - OUTER_RATE * step
        return self.anchor

    def _meet(self, losses):
        loss = sum(losses) / len(losses)
        self.first_loss = loss if self.t == 1 else self.first_loss
        period = self.k if "adaptive_localsgd" in self.names else LOCAL_STEPS
        if self.t > BEGIN and self.t - self.last < period:
            return
        self.last = self.t
        middle = mean([replica.w for replica in self.replicas])
        if "outer" in self.names:
            middle = self._outer(middle)
        for replica in self.replicas:
            replica.w = dict(middle)
        if self.t > BEGIN:
            ratio = math.sqrt(loss / self.first_loss)
            self.k = min(MAX_K, max(1, math.ceil(ratio * INIT_K)))
