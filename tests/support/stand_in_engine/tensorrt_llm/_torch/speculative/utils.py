def get_draft_len_for_batch_size(draft_len_schedule, batch_size, max_draft_len, min_draft_len=0):
    for bound in sorted(draft_len_schedule or {}):
        if batch_size <= bound:
            return draft_len_schedule[bound]
    return max_draft_len if draft_len_schedule is None else min_draft_len
