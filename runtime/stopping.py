"""Whether a token ends its sequence, and how."""

from __future__ import annotations

from octavo.runtime.request import Request


def append_token(request: Request, token_id: int) -> bool:
    """Adds a token to the sequence and its text; True if the sequence has come to its end.

    Of several reasons at once a stop counts, not the length: the token's own, then its text's.
    """
    request.append_token(token_id)
    text = request.text
    if token_id in request.eos_token_ids or token_id in request.stop_token_ids:
        if text is not None and request.params.include_stop_str_in_output:
            text.push(token_id)
        is_eos = token_id in request.eos_token_ids
        request.finish("stop", None if is_eos else token_id)
        return True
    stop = None if text is None else text.push(token_id)
    if stop is not None:
        request.finish("stop", stop)
    elif request.num_tokens >= request.max_total_tokens:
        request.finish("length")
    return request.finished
