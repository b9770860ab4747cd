"""Serving from an event loop: the engine runs in a thread or in a supervised child process.

    AsyncLLM -> RequestBroker -> EngineThread                 -> EngineLoop -> LLMEngine
                              -> EngineSupervisor ~ZeroMQ~ child -> EngineLoop -> LLMEngine

Commands go down, events come up; both are in `messages.py`.
"""
