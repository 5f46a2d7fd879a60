"""The choice of most tokens per second, compiled: a greedy over path bundles and its best prefix. Arrays in, a mask out."""

from __future__ import annotations

import numpy as np

from .kernel import BUFFER_BATCH, BUFFER_NONE, _compiled, _popcount


def best_closure(
    experts: np.ndarray,
    known: np.ndarray,
    values: np.ndarray,
    parents: np.ndarray,
    offsets: np.ndarray,
    *,
    layers: int,
    experts_count: int,
    top_k: int,
    fixed_seconds: float,
    plain_seconds: float,
    token_seconds: float,
    pair_seconds: float,
    rate: float = 0.0,
    rank_masks: np.ndarray | None = None,
    known_factor: float = 1.0,
    unknown_share: float = 1.0,
    root_pairs: float = 0.0,
    max_slowdown: float = np.inf,
    max_nodes: int = 2**31,
    buffer_mode: int = BUFFER_BATCH,
    seed_root: bool = True,
) -> tuple[np.ndarray, float, float]:
    """Choose an ancestor-closed set S of nodes for high goodput; the empty set where nothing pays.

    rate above 0, in tokens per second: maximise sum of P over S - rate * (seconds(S) - fixed_seconds). Otherwise maximise
    this step's own ratio, (R + sum of P over S) / seconds(S) with R trees. Both take

        seconds(S) = fixed_seconds + token_seconds * |S| + pair_seconds * new(S)
        new(S)     = known_factor * (cost of the buffer with S - cost of the buffer without)
                     + (1 - q**k) / ranks * max(0, layers * experts_count - root union - known_factor * new known pairs)
        q          = 1 - unknown_share * top_k / experts_count

    k is the number of nodes of S without a prediction. Each takes its share of the pairs that nothing else is expected
    to read, one after the other and after the known nodes; they add nothing to the buffer. The cost of a buffer is the
    sum over layers of the pairs of the most loaded rank, thus simply its pairs with one rank.

    Rows hold tree after tree, each with its root first and parents before children: experts uint64 [rows, layers*words]
    (any width, 0 too, where nothing is known); known bool [rows]; values float64 [rows], path probabilities P (of roots:
    ignored; above its parent's: lowered to it); parents int64 [rows], row numbers of the whole pack, -1 for roots;
    offsets int64 [trees + 1]. rank_masks: uint64 [ranks, layers*words], the bits that live on each expert-parallel rank;
    None for one rank.

    known_factor: actual new pairs per predicted new pair. unknown_share: factor on the pairs of a node without a
    prediction. root_pairs: expected pairs of all roots together, used where a root has no prediction.
    max_slowdown: S is allowed only if (1 + sum of P over S_i) * max_slowdown >= 1 + (seconds(S) - fixed_seconds) /
    plain_seconds for every tree i, so that no request pays for the others. max_nodes: per tree. seed_root: the roots'
    experts are free. buffer_mode (ablations): BUFFER_BATCH shares new experts among all trees, BUFFER_REQUEST within
    each tree, BUFFER_NONE only between a node and its own ancestors.

    Returns bool [rows] (never True for roots), R + sum of P over S, and seconds(S). Raises ValueError for arrays that do
    not fit each other or a cost that is not finite or negative.

    Method: repeatedly take the bundle (a node with its ancestors that are not yet chosen) of most P per second, ties to
    the lower row, which is the ancestor; return the best allowed prefix of that order. The order does not depend on the
    rate, so the prefix of best ratio is the fixed point of Dinkelbach's iteration over these prefixes: no rounds.
    """
    width = experts.shape[1]
    masks = np.zeros((1, width), np.uint64) if rank_masks is None else rank_masks if width else rank_masks[:, :0]
    rows, trees = len(parents), len(offsets) - 1
    if not (len(experts) == len(known) == len(values) == rows) or (trees and offsets[-1] != rows):
        raise ValueError(
            f"experts, known, values and parents have {len(experts)}, {len(known)}, {len(values)} and {rows} rows and "
            f"offsets end at {offsets[-1]}; all of these must be equal."
        )
    if width % layers or (len(masks) > 1 and masks.shape[1] != width):
        raise ValueError(
            f"experts have {width} words, rank_masks {masks.shape[1]}; both need {layers} layers of equal width."
        )
    costs = (fixed_seconds, plain_seconds, token_seconds, pair_seconds)
    if not (np.isfinite(costs).all() and min(costs) >= 0 and fixed_seconds > 0 and plain_seconds > 0):
        raise ValueError(
            f"fixed_seconds, plain_seconds, token_seconds and pair_seconds are {costs}; "
            "the first two must be above 0, the others at least 0, all finite."
        )
    # Arrays of one layout and flags, scalars of one type: anything else would compile the kernel anew in a request.
    return _best_closure(  # type: ignore[no-any-return]
        np.require(experts, np.uint64, ["C", "W"]),
        np.require(known, np.bool_, ["C", "W"]),
        np.require(values, np.float64, ["C", "W"]),
        np.require(parents, np.int64, ["C", "W"]),
        np.require(offsets, np.int64, ["C", "W"]),
        np.require(masks, np.uint64, ["C", "W"]),
        int(layers),
        float(layers * experts_count),
        max(0.0, 1.0 - unknown_share * top_k / experts_count),
        float(root_pairs) if buffer_mode == BUFFER_BATCH else min(float(root_pairs), float(top_k * layers)),
        float(known_factor),
        float(rate),
        float(fixed_seconds),
        float(plain_seconds),
        float(token_seconds),
        float(pair_seconds),
        float(max_slowdown),
        int(max_nodes),
        int(buffer_mode),
        bool(seed_root),
    )


@_compiled
def _load(layer, buffer, extra, rank_masks, layers):  # type: ignore[no-untyped-def]
    """Pairs of one layer on its most loaded rank, of buffer and extra together."""
    words = len(buffer) // layers
    most = 0
    for rank in range(len(rank_masks)):
        load = 0
        for word in range(layer * words, (layer + 1) * words):
            load += _popcount((buffer[word] | extra[word]) & rank_masks[rank, word])
        most = max(most, load)
    return most


@_compiled
def _price(extra, buffer, loads, rank_masks, layers):  # type: ignore[no-untyped-def]
    """What extra adds to the buffer: (cost, pairs). loads int64 [layers]: the buffer's own, used with several ranks."""
    pairs = 0
    for word in range(len(buffer)):
        pairs += _popcount(extra[word] & ~buffer[word])
    if len(rank_masks) == 1 or pairs == 0:
        return pairs, pairs
    words = len(buffer) // layers
    cost = 0
    for layer in range(layers):
        new = False
        for word in range(layer * words, (layer + 1) * words):
            new = new or (extra[word] & ~buffer[word]) != 0
        if new:
            cost += _load(layer, buffer, extra, rank_masks, layers) - loads[layer]
    return cost, pairs


@_compiled
def _merge(extra, buffer, loads, rank_masks, layers, changed, added):  # type: ignore[no-untyped-def]
    """Put extra into the buffer; (word, new bits) go to changed and added. Returns how many words changed."""
    changes = 0
    for word in range(len(buffer)):
        new = extra[word] & ~buffer[word]
        if new:
            buffer[word] |= new
            changed[changes] = word
            added[changes] = new
            changes += 1
    if len(rank_masks) > 1 and changes:
        for layer in range(layers):
            loads[layer] = _load(layer, buffer, buffer, rank_masks, layers)
    return changes


@_compiled
def _unknown_pairs(unknown, pairs, powers, room, known_factor, ranks):  # type: ignore[no-untyped-def]
    """Expected new pairs of nodes without a prediction, beside `pairs` new known ones. room: pairs beyond the roots'."""
    return (1.0 - powers[unknown]) * max(0.0, room - known_factor * pairs) / ranks


@_compiled
def _best_closure(  # type: ignore[no-untyped-def]
    experts,
    known,
    values,
    parents,
    offsets,
    rank_masks,
    layers,
    all_pairs,
    unknown_keeps,
    root_pairs,
    known_factor,
    rate,
    fixed_seconds,
    plain_seconds,
    token_seconds,
    pair_seconds,
    max_slowdown,
    max_nodes,
    buffer_mode,
    seed_root,
):
    rows, words = experts.shape
    trees = len(offsets) - 1
    ranks = len(rank_masks)
    groups = 1 if buffer_mode == BUFFER_BATCH else trees
    buffers = np.zeros((groups, words), np.uint64)
    loads = np.zeros((groups, layers), np.int64)
    room = np.empty(groups, np.float64)
    changed = np.empty(words, np.int64)
    added = np.empty(words, np.uint64)
    powers = np.ones(rows + 1, np.float64)
    for row in range(rows):
        powers[row + 1] = powers[row] * unknown_keeps

    # The roots' union, per buffer.
    for group in range(groups):
        guessed = False
        for tree in range(trees if groups == 1 else 1):
            root = offsets[tree if groups == 1 else group]
            guessed = guessed or not known[root]
            if seed_root and known[root]:
                _merge(experts[root], buffers[group], loads[group], rank_masks, layers, changed, added)
        union = 0.0
        for word in range(words):
            union += _popcount(buffers[group, word])
        room[group] = all_pairs - (max(union, root_pairs) if seed_root and guessed else union)

    # Candidates: nodes that pay at least for their own token; with P capped by the parent's, no other node is ever in an
    # optimum, nor anything below it. The rate is never below that of the empty set.
    least_value = (rate if rate > 0 else trees / fixed_seconds) * token_seconds
    capped = np.empty(rows, np.float64)
    tree_of = np.empty(rows, np.int64)
    slot_of = np.full(rows, -1, np.int64)
    slot_row = np.empty(rows, np.int64)
    slots = 0
    hope = 0.0  # what the nodes not yet chosen would bring if their experts were free
    first_slot = np.empty(trees, np.int64)
    open_end = np.empty(trees, np.int64)  # open_slots[first_slot : open_end] are the tree's candidates
    tree_best = np.full(trees, -1, np.int64)
    for tree in range(trees):
        first_slot[tree] = slots
        tree_of[offsets[tree]] = tree
        capped[offsets[tree]] = 1.0
        for row in range(offsets[tree] + 1, offsets[tree + 1]):
            tree_of[row] = tree
            capped[row] = min(values[row], capped[parents[row]])
            if capped[row] > least_value:
                slot_of[row] = slots
                slot_row[slots] = row
                slots += 1
                hope += capped[row] - least_value
        open_end[tree] = slots

    # Per candidate: experts of the path without the root, and the bundle's price.
    path = np.empty((slots, words), np.uint64)
    path_unknown = np.zeros(slots, np.int64)
    slot_cost = np.empty(slots, np.int64)
    slot_pairs = np.empty(slots, np.int64)
    slot_unknown = np.empty(slots, np.int64)
    slot_tokens = np.empty(slots, np.int64)
    slot_value = np.empty(slots, np.float64)
    slot_static = np.zeros(slots, np.float64)  # BUFFER_NONE: new pairs
    slot_seconds = np.empty(slots, np.float64)
    open_slots = np.arange(slots)
    own_pairs = np.zeros(rows, np.float64)  # BUFFER_NONE: new pairs of each node beyond its ancestors and root
    until = np.zeros(rows, np.float64)
    for slot in range(slots):
        row = slot_row[slot]
        above = slot_of[parents[row]]
        for word in range(words):
            path[slot, word] = experts[row, word] if known[row] else np.uint64(0)
        if not known[row]:
            path_unknown[slot] = 1
        if above >= 0:
            path_unknown[slot] += path_unknown[above]
            for word in range(words):
                path[slot, word] |= path[above, word]
        group = 0 if groups == 1 else tree_of[row]
        cost, pairs = _price(path[slot], buffers[group], loads[group], rank_masks, layers)
        slot_cost[slot] = cost
        slot_pairs[slot] = pairs
        if buffer_mode == BUFFER_NONE:
            new = _unknown_pairs(path_unknown[slot], pairs, powers, room[group], known_factor, ranks)
            until[row] = known_factor * cost + new
            own_pairs[row] = until[row] - until[parents[row]]

    chosen = np.zeros(rows, np.bool_)
    order = np.empty(slots, np.int64)
    taken = np.zeros(trees, np.int64)
    gain_of = np.zeros(trees, np.float64)
    cost_of = np.zeros(groups, np.int64)
    pairs_of = np.zeros(groups, np.int64)
    unknown_of = np.zeros(groups, np.int64)
    known_new = np.zeros(groups, np.float64)
    unknown_new = np.zeros(groups, np.float64)
    count = 0
    gain = 0.0
    new_pairs = 0.0
    best_count = 0
    best_gain = 0.0
    best_extra = 0.0
    dirty_tree = -1  # the tree whose paths have changed; -1: all
    dirty_group = -1
    changes = 0
    while True:
        best = -1
        for tree in range(trees):
            group = 0 if groups == 1 else tree
            # The other trees' prices, thus their best bundles, are as they were.
            stale = dirty_tree < 0 or tree == dirty_tree or (group == dirty_group and (changes or unknown_of[group]))
            kept = first_slot[tree]
            end = open_end[tree] if stale else kept
            if stale:
                tree_best[tree] = -1
            leader_value = 0.0
            leader_seconds = 0.0
            for place in range(kept, end):
                slot = open_slots[place]
                row = slot_row[slot]
                again = dirty_tree < 0 or tree == dirty_tree
                if again:
                    if chosen[row]:
                        continue
                    value = 0.0
                    tokens = 0
                    unknown = 0
                    pairs_static = 0.0
                    at = row
                    while parents[at] >= 0 and not chosen[at]:
                        value += capped[at]
                        tokens += 1
                        unknown += 0 if known[at] else 1
                        pairs_static += own_pairs[at]
                        at = parents[at]
                    if tokens > max_nodes - taken[tree]:
                        continue  # nor does it fit later: a pick frees at most as many tokens as it takes
                    slot_value[slot] = value
                    slot_tokens[slot] = tokens
                    slot_unknown[slot] = unknown
                    slot_static[slot] = pairs_static
                if changes and slot_pairs[slot] and group == dirty_group:
                    left = slot_pairs[slot]
                    if ranks > 1:
                        slot_cost[slot], left = _price(path[slot], buffers[group], loads[group], rank_masks, layers)
                        again = True
                    elif 3 * changes > words:
                        left = 0
                        for word in range(words):
                            left += _popcount(path[slot, word] & ~buffers[group, word])
                    else:
                        for change in range(changes):
                            left -= _popcount(path[slot, changed[change]] & added[change])
                    if left != slot_pairs[slot]:
                        again = True
                        slot_pairs[slot] = left
                        if ranks == 1:
                            slot_cost[slot] = left
                unknown = slot_unknown[slot] + unknown_of[group]
                if again or (unknown and group == dirty_group):
                    new = slot_static[slot]
                    if buffer_mode != BUFFER_NONE:
                        new = known_factor * slot_cost[slot]
                        if unknown:
                            pairs = pairs_of[group] + slot_pairs[slot]
                            new += _unknown_pairs(unknown, pairs, powers, room[group], known_factor, ranks)
                            new -= unknown_new[group]
                    slot_seconds[slot] = token_seconds * slot_tokens[slot] + pair_seconds * max(0.0, new)
                open_slots[kept] = slot
                kept += 1
                # value / seconds without the division; rows ascend, so the first of equals is the ancestor or lower row.
                if tree_best[tree] < 0 or slot_value[slot] * leader_seconds > leader_value * slot_seconds[slot]:
                    tree_best[tree] = slot
                    leader_value = slot_value[slot]
                    leader_seconds = slot_seconds[slot]
            if stale:
                open_end[tree] = kept
            leader = tree_best[tree]
            if leader >= 0 and (
                best < 0 or slot_value[leader] * slot_seconds[best] > slot_value[best] * slot_seconds[leader]
            ):
                best = leader
        if best < 0:
            break

        row = slot_row[best]
        tree = tree_of[row]
        group = 0 if groups == 1 else tree
        count_before = count
        at = row
        while parents[at] >= 0 and not chosen[at]:
            chosen[at] = True
            order[count] = at
            count += 1
            hope -= capped[at] - least_value
            gain_of[tree] += capped[at]
            if buffer_mode == BUFFER_NONE:
                new_pairs += own_pairs[at]
            at = parents[at]
        taken[tree] += count - count_before
        gain += slot_value[best]
        changes = 0
        dirty_tree = tree
        dirty_group = group
        if buffer_mode != BUFFER_NONE:
            cost_of[group] += slot_cost[best]
            pairs_of[group] += slot_pairs[best]
            unknown_of[group] += slot_unknown[best]
            if slot_pairs[best]:
                changes = _merge(path[best], buffers[group], loads[group], rank_masks, layers, changed, added)
            new_pairs -= known_new[group] + unknown_new[group]
            known_new[group] = known_factor * cost_of[group]
            unknown_new[group] = _unknown_pairs(
                unknown_of[group], pairs_of[group], powers, room[group], known_factor, ranks
            )
            new_pairs += known_new[group] + unknown_new[group]

        extra = token_seconds * count + pair_seconds * new_pairs
        price = rate if rate > 0 else (trees + best_gain) / (fixed_seconds + best_extra)
        lead = (gain - best_gain) - price * (extra - best_extra)
        if lead > 0:
            least = np.inf
            for tree in range(trees):
                least = min(least, gain_of[tree])
            if (1.0 + least) * max_slowdown >= 1.0 + extra / plain_seconds:
                best_count = count
                best_gain = gain
                best_extra = extra
                lead = 0.0
        if lead + hope <= 0:
            break  # not even free experts could make a later prefix better

    chosen[:] = False
    for at in range(best_count):
        chosen[order[at]] = True
    return chosen, trees + best_gain, fixed_seconds + best_extra


def warm_up() -> None:
    """Compile (or load) the kernel now, seconds the first time, so that no request waits for it."""
    best_closure(
        np.zeros((2, 1), np.uint64),
        np.ones(2, np.bool_),
        np.ones(2, np.float64),
        np.array([-1, 0], np.int64),
        np.array([0, 2], np.int64),
        layers=1,
        experts_count=1,
        top_k=1,
        fixed_seconds=1.0,
        plain_seconds=1.0,
        token_seconds=0.1,
        pair_seconds=0.1,
    )
