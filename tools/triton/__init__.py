"""A model repository for Triton Inference Server, and what runs in it.

    tritonserver ~ stub: stub/model.py -> Supervisor ~ socket ~ engine_child -> AsyncLLM

`stub/` is copied into the repository. Triton's Python imports it, which has neither Octavo nor its
libraries; so the engine runs in a child process under an interpreter that does.
"""
