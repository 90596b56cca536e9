"""The order in which a compiled program runs its kernels."""

from collections import defaultdict, deque

from jfleet._planning.nodes import Node


def dependencies(nodes: list[Node]) -> tuple[list[set[int]], list[list[int]]]:
    """For every node, those it waits for and those that wait for it."""
    maker = {w: n for n, node in enumerate(nodes) for w in node.writes}
    before = [
        {maker[r] for r in node.reads | node.waits if r in maker} for node in nodes
    ]
    after: list[list[int]] = [[] for _ in nodes]
    for n, waits in enumerate(before):
        for m in waits:
            after[m].append(n)
    return before, after


def breadth_first(nodes: list[Node]) -> list[Node]:
    """Run whatever is ready, in the order in which it became so."""
    before, after = dependencies(nodes)
    left = [len(waits) for waits in before]
    queue = deque(n for n, count in enumerate(left) if not count)
    order = []
    while queue:
        n = queue.popleft()
        order.append(nodes[n])
        for m in after[n]:
            left[m] -= 1
            if not left[m]:
                queue.append(m)
    assert len(order) == len(nodes)
    return order


def combined(nodes: list[Node]) -> list[Node]:
    """Join reductions over the same axes that do not wait for one another."""
    before, _ = dependencies(nodes)
    above: list[set[int]] = []  # reductions that a node waits for
    groups: dict[object, list[list[int]]] = defaultdict(list)
    for n, node in enumerate(nodes):
        seen: set[int] = set()
        for m in before[n]:
            seen |= above[m]
            if nodes[m].op.name == "all-reduce":
                seen.add(m)
        above.append(seen)
        exchange = node.op.exchange
        if node.op.name == "all-reduce" and exchange is not None:
            fitting = groups[exchange.axes, exchange.dtype]
            group = next((g for g in fitting if not seen.intersection(g)), None)
            if group is None:
                fitting.append([n])
            else:
                group.append(n)
    joined = [g for of_kind in groups.values() for g in of_kind if len(g) > 1]
    gone = {n for g in joined for n in g}
    new = [
        Node(
            [nodes[n].op for n in g],
            set().union(*(nodes[n].reads for n in g)),
            [w for n in g for w in nodes[n].writes],
            set().union(*(nodes[n].waits for n in g)),
        )
        for g in joined
    ]
    return [node for n, node in enumerate(nodes) if n not in gone] + new
