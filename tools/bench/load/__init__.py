"""Load on a server that runs already: `octavo bench serve`.

plan -> arrivals, prompts -> runner -> protocols -> records -> report
"""
