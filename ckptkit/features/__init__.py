"""Captured features: hidden states of a target, stored for training a draft, and what can be wrong with them.

For each sample of S tokens there are the token ids [S], a loss mask [S], the target's hidden states at the layers that
the draft taps, side by side [S, taps x hidden], and its last ones [S, hidden]: after the final norm, before the head.
They are stored in one of these dialects:

=========  ================================================  =====================================================
dialect    carrier                                           tapped and last states
=========  ================================================  =====================================================
specforge  a ``torch.save`` dict a sample, ``.ckpt`` or      ``hidden_states``, ``target_last_hidden_states``
           ``.ckpt.gz`` (``specforge_hidden_states_v1``)
aux        the same files: EAGLE-3, and DSpark in SpecForge  ``aux_hidden_state``, ``hidden_state``
           branches for DeepSeek-V4
deepspec   ``manifest.json``, ``samples.idx`` and shards     ``target_hidden_states``,
           (DeepSpec's target cache, version 2)              ``target_last_hidden_states``
=========  ================================================  =====================================================

Sources: SpecForge 0.2 (``algorithms/common/dflash_family_data.py``, ``algorithms/eagle3/data.py``, ``runtime/data_plane``)
and DeepSpec (``data/target_cache_dataset.py``).

Samples are looked at one by one, each in blocks of rows; of a ``.ckpt`` only the pickle is loaded (tensors alone, no
code), tensors are read from the file where they lie. A ``.ckpt.gz`` is unpacked into a temporary file first.
"""
