"""What a model repository holds: Python 3.10, numpy and Triton's own module are all it may import.

Its files import each other relatively, since they lie in the folder of the model's version there.
"""
