"""Layouts of the same values: containers of FP4 codes, experts one by one or stacked, and how config.json tells them.

=============  ===================================================================  =================================
layout         codes                                                                exponents, one for 32 columns
=============  ===================================================================  =================================
``dsv4``       ``experts.0.w1.weight`` I8 [N, K/2] (or F4 [N, K])                   ``.scale`` F8_E8M0 [N, K/32]
``mxfp4-ct``   ``experts.0.w1.weight_packed`` U8 [N, K/2]                           ``.weight_scale`` U8 [N, K/32]
``gpt-oss``    ``experts.gate_up_proj_blocks`` U8 [E, N, K/32, 16], gate and up     ``…_scales`` U8 [E, N, K/32]
               row by row in turn; ``experts.down_proj_blocks``
``codes``      ``weight_codes`` U8 [N, K], ``…_codes`` [E, N, K/32, 32]: a code     as it was
               a byte
=============  ===================================================================  =================================

``per-expert`` and ``fused`` are experts of floats, or of FP8 with block scales: ``experts.0.gate_proj.weight`` …
against ``experts.gate_up_proj`` and ``experts.down_proj`` of rank 3 (:mod:`ckptkit.families.experts`).
"""
