"""The OpenAI-compatible server: `octavo serve`.

    HTTP -> guard -> application -> completions | chat -> Service -> AsyncLLM -> engine's process

requests.py and responses.py are what clients send and get, errors.py what they get instead.
"""
