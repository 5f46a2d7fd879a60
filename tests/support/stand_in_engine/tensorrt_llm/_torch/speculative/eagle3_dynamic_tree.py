"""Candidates of K + K*K*(D-1) per request; the probability of the right token, and its place among K, depend on the token."""

import torch

from .eagle3 import Eagle3OneModelWorker

VOCABULARY = 211


def after(token):
    return (7 * token + 3) % VOCABULARY


def children(token, k):
    """k tokens with descending probabilities; the right one is at a place that depends on the token."""
    right, place = after(token), token % k
    tokens = [(right + 1 + i) % VOCABULARY for i in range(k)]
    tokens[place] = right
    chances = [0.5 ** (i + 1) for i in range(k)]
    return tokens, chances


class Eagle3OneModelDynamicTreeWorker(Eagle3OneModelWorker):
    def __init__(self, spec_config):
        super().__init__(spec_config)
        self.K, self.max_total_draft_tokens = spec_config.dynamic_tree_max_topK, spec_config.max_total_draft_tokens
        K, max_draft_len, max_batch_size = self.K, self.max_draft_len, spec_config.max_batch_size
        count = K + K * K * (max_draft_len - 1)
        self.history_score_buffer = torch.zeros(max_batch_size, count)
        self.history_draft_tokens_buffer = torch.zeros(max_batch_size, count, dtype=torch.int32)
        width = max(K * (max_draft_len - 1) + 1, K + 1)
        self.history_draft_tokens_parent_buffer = torch.zeros(max_batch_size, width, dtype=torch.int64)
        self._accepted_tokens_buf = torch.zeros(max_batch_size, max_draft_len + 1, dtype=torch.int32)
        self._num_accepted_tokens_buf = torch.ones(max_batch_size, dtype=torch.int32)
        self._accepted_draft_indices_tensor = torch.full((max_batch_size, max_draft_len), -1, dtype=torch.int32)
        self.trees = {}  # request -> (tokens, parents): what its next step verifies; parents -1 below the root

    def resampling_final_draft_tokens(self, batch_size):
        indices = torch.topk(self.history_score_buffer[:batch_size], self.max_total_draft_tokens).indices.sort().values
        return self.history_draft_tokens_buffer[:batch_size].gather(1, indices), indices

    def _forward_impl(
        self,
        input_ids,
        position_ids,
        hidden_states,
        logits,
        attn_metadata,
        spec_metadata,
        draft_model,
        resource_manager,
    ):
        batch, first = len(spec_metadata.request_ids), 0
        num_contexts, attn_metadata.num_contexts = attn_metadata.num_contexts, 0
        self._accepted_draft_indices_tensor.fill_(-1)
        for at, (request, length) in enumerate(zip(spec_metadata.request_ids, spec_metadata.seq_lens, strict=True)):
            rows = input_ids[first : first + length].tolist()
            first += length
            if at < num_contexts:
                decided, path = [after(rows[-1])], []
            else:
                decided, path = self.verify(request, rows)
            self._accepted_tokens_buf[at, : len(decided)] = torch.tensor(decided, dtype=torch.int32)
            self._num_accepted_tokens_buf[at] = len(decided)
            self._accepted_draft_indices_tensor[at, : len(path)] = torch.tensor(path, dtype=torch.int32)
            self.draft(at, decided[-1])
        tokens, indices = self.resampling_final_draft_tokens(batch)
        for at, request in enumerate(spec_metadata.request_ids):
            # A request that has just read its prompt has its first tree a step later.
            built = None if at < num_contexts else self.read(at, indices[at].tolist())
            self.trees[request] = (tokens[at].tolist(), built)
        return {
            "new_tokens": self._accepted_tokens_buf[:batch].clone(),
            "new_tokens_lens": self._num_accepted_tokens_buf[:batch].clone(),
            "next_draft_tokens": tokens,
        }

    def verify(self, request, rows):
        """The longest path that the target would have taken, and one token more."""
        tokens, parents = self.trees[request]
        assert rows[1:] == tokens
        place, current, decided, path = -1, rows[0], [], []
        while parents is not None:
            found = [i for i, parent in enumerate(parents) if parent == place and tokens[i] == after(current)]
            if not found:
                break
            place, current = found[0], tokens[found[0]]
            decided.append(current)
            path.append(place)
        return [*decided, after(current)], path

    def read(self, at, indices):
        """Parents as places among the chosen, by the documented rule; refuses a choice that breaks the contract."""
        assert len(indices) == self.max_total_draft_tokens and indices == sorted(set(indices)), indices
        parents = []
        for index in indices:
            above = -1 if index < self.K else int(self.history_draft_tokens_parent_buffer[at, index // self.K])
            parents.append(-1 if above < 0 else indices.index(above))
        return parents

    def draft(self, at, root):
        k = self.K
        tokens, chances = children(root, k)
        layer = list(zip(tokens, chances, range(k), strict=True))
        history, above = list(layer), [-1, *range(k)]
        for depth in range(1, self.max_draft_len):
            start = len(history)
            grown = []
            for token, chance, _ in layer:
                more, shares = children(token, k)
                grown.extend((t, chance * share) for t, share in zip(more, shares, strict=True))
            history.extend((t, c, start + i) for i, (t, c) in enumerate(grown))
            best = sorted(range(len(grown)), key=lambda i: -grown[i][1])[:k]
            layer = [(*grown[i], start + i) for i in best]
            if depth < self.max_draft_len - 1:
                above.extend(start + i for i in best)
        self.history_draft_tokens_buffer[at] = torch.tensor([h[0] for h in history], dtype=torch.int32)
        self.history_score_buffer[at] = torch.tensor([h[1] for h in history])
        self.history_draft_tokens_parent_buffer[at, : len(above)] = torch.tensor(above)
