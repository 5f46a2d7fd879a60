"""What a predictor must beat, each made from the training documents alone. Numpy only.

token_table     the experts that were most frequent for the token (the in-process fallback)
previous_token  the experts that the last verified token really used: the one before, or, for a draft row, the one before the
                token that it hangs from; the popular ones where they are unknown
popularity      each layer's most frequent experts
"""

from __future__ import annotations

import numpy as np

from ecospec_proto.token_table import TokenTable

from .data import Window


def predictions(table: TokenTable, window: Window, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Baseline -> experts [n, layers, top_k] of the window's rows."""
    popular = table.popular.astype(np.int16)[None]
    before = window.parents[window.anchors[rows]]
    copied = np.where((before >= 0)[:, None, None], window.routes[before], -1)
    whole = (copied >= 0).all(-1, keepdims=True)
    return {
        "token_table": table.lookup(window.tokens[rows]).astype(np.int16),
        "previous_token": np.where(whole, copied, popular),
        "popularity": np.broadcast_to(popular, copied.shape),
    }
