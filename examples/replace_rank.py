"""A rank is replaced while the others keep what they have: data parallel, python examples/replace_rank.py.

Its own supervisor starts the ranks anew, and counts the generations: whoever loses a neighbour in a collective asks for
the next one. There the survivors stage what they hold, as a job of their own, and then all ranks load it: survivors get
back the bits they had, from their own memory, the newcomer gets its own from them. Nobody goes back to an older step.
"""
