"""Output heads whose rows are spread over ranks: what each rank chooses, how it is gathered, and what must come of it.

A rank holds a slice of the head's rows. Instead of all logits, it sends its first few *candidates*: their logits and
token ids. The token chosen from the candidates of all ranks must be the one that the whole head would choose, whatever
the slices, the order of the rows and the ties.

==============  =================================================================================================
head.py         the head of a checkpoint: its rows, their tokens, bias, soft cap; the slices that an engine cuts
proof.py        digests of rows: whether a head's rows are those of its source, each in its place
choice.py       candidates of a rank, their payload, the winner (torch)
rank.py         one rank, a process of its own
ranks.py        starting ranks, and what they send
agreement.py    what was chosen against the whole head (numpy)
states.py       hidden states that need no run of a model, and files of real ones
pages.py        the checks ``head.*``
timing.py       how long choices and gathers take on a device
==============  =================================================================================================

The protocol is that of LightLLM's vocabulary-parallel top-k, with a rule for ties.
"""
