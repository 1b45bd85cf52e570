import torch


def forward(
    input_ids,
    positions,
    query_start_loc,
    seq_lens,
    slot_ids,
    block_table,
    num_seqs,
    logits_indices,
    layers__0__linear_attn__conv_state,
    layers__0__linear_attn__recurrent_state,
    layers__0__linear_attn__draft_rows,
    layers__0__linear_attn__committed_len,
    layers__1__ple__ngram_ids,
    layers__1__ple__ple_conv_state,
    layers__1__linear_attn__conv_state,
    layers__1__linear_attn__recurrent_state,
    layers__1__linear_attn__draft_rows,
    layers__1__linear_attn__committed_len,
    layers__2__self_attn__kv_cache,
    layers__2__self_attn__indexer__index_k_cache,
    layers__2__self_attn__indexer__index_k_ring,
    layers__2__self_attn__indexer__index_position_ring,
    embed_tokens__weight,
    layers__0__attn_hyper_connection__input_mix_weight_up__weight,
    layers__0__mlp_hyper_connection__input_mix_weight_up__weight,
    layers__0__linear_attn__A_log,
    layers__0__linear_attn__dt_bias,
    layers__0__linear_attn__norm__weight,
    layers__0__linear_attn__out_proj__weight,
    layers__0__mlp__gate__weight,
    layers__0__mlp__experts__gate_up_proj,
    layers__0__mlp__experts__down_proj,
    layers__0__mlp__shared_expert__down_proj__weight,
    layers__0__mlp__shared_expert_gate__weight,
    layers__1__attn_hyper_connection__input_mix_weight_up__weight,
    layers__1__mlp_hyper_connection__input_mix_weight_up__weight,
    layers__1__linear_attn__A_log,
    layers__1__linear_attn__dt_bias,
    layers__1__linear_attn__norm__weight,
    layers__1__linear_attn__out_proj__weight,
    layers__1__ple__ple_embedding__ngram_embedding__weight,
    layers__1__ple__key_proj__weight,
    layers__1__ple__value_proj__weight,
    layers__1__mlp__gate__weight,
    layers__1__mlp__experts__gate_up_proj,
    layers__1__mlp__experts__down_proj,
    layers__1__mlp__shared_expert__down_proj__weight,
    layers__1__mlp__shared_expert_gate__weight,
    layers__2__attn_hyper_connection__input_mix_weight_up__weight,
    layers__2__mlp_hyper_connection__input_mix_weight_up__weight,
    layers__2__self_attn__o_proj__weight,
    layers__2__self_attn__indexer__index_qk_proj__weight,
    layers__2__mlp__gate__weight,
    layers__2__mlp__experts__gate_up_proj,
    layers__2__mlp__experts__down_proj,
    layers__2__mlp__shared_expert__down_proj__weight,
    layers__2__mlp__shared_expert_gate__weight,
    hyper_connection_mixer__input_mix_weight_down__weight,
    hyper_connection_mixer__input_mix_weight_up__weight,
    lm_head__weight,
    inv_freq,
    layers__1__ple__ple_embedding__layer_multipliers,
    layers__1__ple__ple_embedding__ngram_heads_vocab_sizes,
    layers__1__ple__ple_embedding__ngram_heads_offsets,
    layers__0__attn_hyper_connection__hc_project__cat__weight,
    layers__0__linear_attn__in_proj_qkv_in_proj_z__cat__weight,
    layers__0__linear_attn__in_proj_b_in_proj_a__cat__weight,
    layers__0__linear_attn__conv1d__view__weight,
    layers__0__mlp_hyper_connection__hc_project__cat__weight,
    layers__0__mlp__shared_expert__cat__weight,
    layers__1__ple__conv1d__view__weight,
    layers__1__attn_hyper_connection__hc_project__cat__weight,
    layers__1__linear_attn__in_proj_qkv_in_proj_z__cat__weight,
    layers__1__linear_attn__in_proj_b_in_proj_a__cat__weight,
    layers__1__linear_attn__conv1d__view__weight,
    layers__1__mlp_hyper_connection__hc_project__cat__weight,
    layers__1__mlp__shared_expert__cat__weight,
    layers__2__attn_hyper_connection__hc_project__cat__weight,
    layers__2__self_attn__q_proj_k_proj_v_proj__cat__weight,
    layers__2__mlp_hyper_connection__hc_project__cat__weight,
    layers__2__mlp__shared_expert__cat__weight,
    layers__0__attn_hyper_connection__hc_norm__add__weight,
    layers__0__mlp_hyper_connection__hc_norm__add__weight,
    layers__1__ple__norm_key__add__weight,
    layers__1__ple__norm_query__add__weight,
    layers__1__ple__norm_conv__add__weight,
    layers__1__attn_hyper_connection__hc_norm__add__weight,
    layers__1__mlp_hyper_connection__hc_norm__add__weight,
    layers__2__attn_hyper_connection__hc_norm__add__weight,
    layers__2__self_attn__indexer__q_layernorm__add__weight,
    layers__2__self_attn__indexer__k_layernorm__add__weight,
    layers__2__self_attn__q_norm__add__weight,
    layers__2__self_attn__k_norm__add__weight,
    layers__2__mlp_hyper_connection__hc_norm__add__weight,
    hyper_connection_mixer__hc_norm__add__weight,
):
    embed_tokens__embedding = torch.ops.aten.embedding.default(embed_tokens__weight, input_ids)  # bfloat16[T, 32]
    cat = torch.ops.aten.cat.default([embed_tokens__embedding, embed_tokens__embedding, embed_tokens__embedding, embed_tokens__embedding], -1)  # bfloat16[T, 128]
    layers__0__attn_hyper_connection__hc_norm = torch.ops.q4e.hc_norm.default(cat, layers__0__attn_hyper_connection__hc_norm__add__weight, 4, 1e-06)  # bfloat16[T, 128]
    layers__0__attn_hyper_connection__hc_project = torch.ops.q4e.hc_project.default(layers__0__attn_hyper_connection__hc_norm, layers__0__attn_hyper_connection__hc_project__cat__weight, 4)  # bfloat16[T, 16], bfloat16[T, 4]
    layers__0__attn_hyper_connection__hc_project__lowrank = layers__0__attn_hyper_connection__hc_project[0]  # bfloat16[T, 16]
    layers__0__attn_hyper_connection__hc_project__inject = layers__0__attn_hyper_connection__hc_project[1]  # bfloat16[T, 4]
    layers__0__attn_hyper_connection__hc_gate_mix = torch.ops.q4e.hc_gate_mix.default(layers__0__attn_hyper_connection__hc_project__lowrank, layers__0__attn_hyper_connection__input_mix_weight_up__weight, layers__0__attn_hyper_connection__hc_norm, 4)  # bfloat16[T, 32]
    layers__0__linear_attn__in_proj_qkv_in_proj_z = torch.ops.aten.linear.default(layers__0__attn_hyper_connection__hc_gate_mix, layers__0__linear_attn__in_proj_qkv_in_proj_z__cat__weight)  # bfloat16[T, 320]
    layers__0__linear_attn__in_proj_b_in_proj_a = torch.ops.aten.linear.default(layers__0__attn_hyper_connection__hc_gate_mix, layers__0__linear_attn__in_proj_b_in_proj_a__cat__weight)  # bfloat16[T, 8]
    layers__0__linear_attn__causal_conv1d = torch.ops.q4e.causal_conv1d.default(layers__0__linear_attn__in_proj_qkv_in_proj_z, layers__0__linear_attn__conv1d__view__weight, layers__0__linear_attn__conv_state, query_start_loc, seq_lens, slot_ids, num_seqs)  # bfloat16[T, 192]
    layers__0__linear_attn__gated_delta_rule = torch.ops.q4e.gated_delta_rule.default(layers__0__linear_attn__causal_conv1d, layers__0__linear_attn__in_proj_qkv_in_proj_z, layers__0__linear_attn__in_proj_b_in_proj_a, layers__0__linear_attn__A_log, layers__0__linear_attn__dt_bias, layers__0__linear_attn__norm__weight, layers__0__linear_attn__recurrent_state, layers__0__linear_attn__draft_rows, layers__0__linear_attn__committed_len, query_start_loc, seq_lens, slot_ids, num_seqs, 2, 1e-06, 'sigmoid')  # bfloat16[T, 128]
    layers__0__linear_attn__out_proj__linear = torch.ops.aten.linear.default(layers__0__linear_attn__gated_delta_rule, layers__0__linear_attn__out_proj__weight)  # bfloat16[T, 32]
    layers__0__mlp_hyper_connection__hc_read = torch.ops.q4e.hc_read.default(cat, layers__0__linear_attn__out_proj__linear, layers__0__attn_hyper_connection__hc_project__inject, layers__0__mlp_hyper_connection__hc_norm__add__weight, layers__0__mlp_hyper_connection__hc_project__cat__weight, layers__0__mlp_hyper_connection__input_mix_weight_up__weight, 1e-06)  # bfloat16[T, 128], bfloat16[T, 32], bfloat16[T, 4]
    layers__0__mlp_hyper_connection__hc_read__combined = layers__0__mlp_hyper_connection__hc_read[0]  # bfloat16[T, 128]
    layers__0__mlp_hyper_connection__hc_read__mixed = layers__0__mlp_hyper_connection__hc_read[1]  # bfloat16[T, 32]
    layers__0__mlp_hyper_connection__hc_read__inject = layers__0__mlp_hyper_connection__hc_read[2]  # bfloat16[T, 4]
    layers__0__mlp__moe = torch.ops.q4e.moe.default(layers__0__mlp_hyper_connection__hc_read__mixed, layers__0__mlp__gate__weight, layers__0__mlp__experts__gate_up_proj, layers__0__mlp__experts__down_proj, layers__0__mlp__shared_expert__cat__weight, layers__0__mlp__shared_expert__down_proj__weight, layers__0__mlp__shared_expert_gate__weight, query_start_loc, num_seqs, 3, 1)  # bfloat16[T, 32]
    layers__0__mlp_hyper_connection__combine__unsqueeze = torch.ops.aten.unsqueeze.default(layers__0__mlp_hyper_connection__hc_read__inject, 2)  # bfloat16[T, 4, 1]
    layers__0__mlp_hyper_connection__combine__unsqueeze_1 = torch.ops.aten.unsqueeze.default(layers__0__mlp__moe, 1)  # bfloat16[T, 1, 32]
    layers__0__mlp_hyper_connection__combine__mul = torch.ops.aten.mul.Tensor(layers__0__mlp_hyper_connection__combine__unsqueeze, layers__0__mlp_hyper_connection__combine__unsqueeze_1)  # bfloat16[T, 4, 32]
    layers__0__mlp_hyper_connection__combine__view = torch.ops.aten.view.default(layers__0__mlp_hyper_connection__combine__mul, [-1, 128])  # bfloat16[T, 128]
    layers__0__mlp_hyper_connection__combine__add = torch.ops.aten.add.Tensor(layers__0__mlp_hyper_connection__hc_read__combined, layers__0__mlp_hyper_connection__combine__view)  # bfloat16[T, 128]
    layers__1__ple__ple_embedding__ple_hash = torch.ops.q4e.ple_hash.default(input_ids, layers__1__ple__ngram_ids, layers__1__ple__ple_embedding__layer_multipliers, layers__1__ple__ple_embedding__ngram_heads_vocab_sizes, layers__1__ple__ple_embedding__ngram_heads_offsets, query_start_loc, seq_lens, slot_ids, num_seqs, 3)  # int64[T, 4]
    layers__1__ple__ple_embedding__ple_gather = torch.ops.q4e.ple_gather.default(layers__1__ple__ple_embedding__ple_hash, layers__1__ple__ple_embedding__ngram_embedding__weight)  # bfloat16[T, 64]
    layers__1__ple__key_proj__linear = torch.ops.aten.linear.default(layers__1__ple__ple_embedding__ple_gather, layers__1__ple__key_proj__weight)  # bfloat16[T, 128]
    layers__1__ple__value_proj__linear = torch.ops.aten.linear.default(layers__1__ple__ple_embedding__ple_gather, layers__1__ple__value_proj__weight)  # bfloat16[T, 32]
    layers__1__ple__ple_conv = torch.ops.q4e.ple_conv.default(layers__0__mlp_hyper_connection__combine__add, layers__1__ple__key_proj__linear, layers__1__ple__value_proj__linear, layers__1__ple__norm_key__add__weight, layers__1__ple__norm_query__add__weight, layers__1__ple__norm_conv__add__weight, layers__1__ple__conv1d__view__weight, layers__1__ple__ple_conv_state, query_start_loc, seq_lens, slot_ids, num_seqs, 3, 1e-06)  # bfloat16[T, 128]
    layers__1__attn_hyper_connection__hc_norm = torch.ops.q4e.hc_norm.default(layers__1__ple__ple_conv, layers__1__attn_hyper_connection__hc_norm__add__weight, 4, 1e-06)  # bfloat16[T, 128]
    layers__1__attn_hyper_connection__hc_project = torch.ops.q4e.hc_project.default(layers__1__attn_hyper_connection__hc_norm, layers__1__attn_hyper_connection__hc_project__cat__weight, 4)  # bfloat16[T, 16], bfloat16[T, 4]
    layers__1__attn_hyper_connection__hc_project__lowrank = layers__1__attn_hyper_connection__hc_project[0]  # bfloat16[T, 16]
    layers__1__attn_hyper_connection__hc_project__inject = layers__1__attn_hyper_connection__hc_project[1]  # bfloat16[T, 4]
    layers__1__attn_hyper_connection__hc_gate_mix = torch.ops.q4e.hc_gate_mix.default(layers__1__attn_hyper_connection__hc_project__lowrank, layers__1__attn_hyper_connection__input_mix_weight_up__weight, layers__1__attn_hyper_connection__hc_norm, 4)  # bfloat16[T, 32]
    layers__1__linear_attn__in_proj_qkv_in_proj_z = torch.ops.aten.linear.default(layers__1__attn_hyper_connection__hc_gate_mix, layers__1__linear_attn__in_proj_qkv_in_proj_z__cat__weight)  # bfloat16[T, 320]
    layers__1__linear_attn__in_proj_b_in_proj_a = torch.ops.aten.linear.default(layers__1__attn_hyper_connection__hc_gate_mix, layers__1__linear_attn__in_proj_b_in_proj_a__cat__weight)  # bfloat16[T, 8]
    layers__1__linear_attn__causal_conv1d = torch.ops.q4e.causal_conv1d.default(layers__1__linear_attn__in_proj_qkv_in_proj_z, layers__1__linear_attn__conv1d__view__weight, layers__1__linear_attn__conv_state, query_start_loc, seq_lens, slot_ids, num_seqs)  # bfloat16[T, 192]
    layers__1__linear_attn__gated_delta_rule = torch.ops.q4e.gated_delta_rule.default(layers__1__linear_attn__causal_conv1d, layers__1__linear_attn__in_proj_qkv_in_proj_z, layers__1__linear_attn__in_proj_b_in_proj_a, layers__1__linear_attn__A_log, layers__1__linear_attn__dt_bias, layers__1__linear_attn__norm__weight, layers__1__linear_attn__recurrent_state, layers__1__linear_attn__draft_rows, layers__1__linear_attn__committed_len, query_start_loc, seq_lens, slot_ids, num_seqs, 2, 1e-06, 'sigmoid')  # bfloat16[T, 128]
    layers__1__linear_attn__out_proj__linear = torch.ops.aten.linear.default(layers__1__linear_attn__gated_delta_rule, layers__1__linear_attn__out_proj__weight)  # bfloat16[T, 32]
    layers__1__mlp_hyper_connection__hc_read = torch.ops.q4e.hc_read.default(layers__1__ple__ple_conv, layers__1__linear_attn__out_proj__linear, layers__1__attn_hyper_connection__hc_project__inject, layers__1__mlp_hyper_connection__hc_norm__add__weight, layers__1__mlp_hyper_connection__hc_project__cat__weight, layers__1__mlp_hyper_connection__input_mix_weight_up__weight, 1e-06)  # bfloat16[T, 128], bfloat16[T, 32], bfloat16[T, 4]
    layers__1__mlp_hyper_connection__hc_read__combined = layers__1__mlp_hyper_connection__hc_read[0]  # bfloat16[T, 128]
    layers__1__mlp_hyper_connection__hc_read__mixed = layers__1__mlp_hyper_connection__hc_read[1]  # bfloat16[T, 32]
    layers__1__mlp_hyper_connection__hc_read__inject = layers__1__mlp_hyper_connection__hc_read[2]  # bfloat16[T, 4]
    layers__1__mlp__moe = torch.ops.q4e.moe.default(layers__1__mlp_hyper_connection__hc_read__mixed, layers__1__mlp__gate__weight, layers__1__mlp__experts__gate_up_proj, layers__1__mlp__experts__down_proj, layers__1__mlp__shared_expert__cat__weight, layers__1__mlp__shared_expert__down_proj__weight, layers__1__mlp__shared_expert_gate__weight, query_start_loc, num_seqs, 3, 1)  # bfloat16[T, 32]
    layers__2__attn_hyper_connection__hc_read = torch.ops.q4e.hc_read.default(layers__1__mlp_hyper_connection__hc_read__combined, layers__1__mlp__moe, layers__1__mlp_hyper_connection__hc_read__inject, layers__2__attn_hyper_connection__hc_norm__add__weight, layers__2__attn_hyper_connection__hc_project__cat__weight, layers__2__attn_hyper_connection__input_mix_weight_up__weight, 1e-06)  # bfloat16[T, 128], bfloat16[T, 32], bfloat16[T, 4]
    layers__2__attn_hyper_connection__hc_read__combined = layers__2__attn_hyper_connection__hc_read[0]  # bfloat16[T, 128]
    layers__2__attn_hyper_connection__hc_read__mixed = layers__2__attn_hyper_connection__hc_read[1]  # bfloat16[T, 32]
    layers__2__attn_hyper_connection__hc_read__inject = layers__2__attn_hyper_connection__hc_read[2]  # bfloat16[T, 4]
    layers__2__self_attn__indexer__index_qk_proj__linear = torch.ops.aten.linear.default(layers__2__attn_hyper_connection__hc_read__mixed, layers__2__self_attn__indexer__index_qk_proj__weight)  # bfloat16[T, 48]
    layers__2__self_attn__indexer__qsa_indexer = torch.ops.q4e.qsa_indexer.default(layers__2__self_attn__indexer__index_qk_proj__linear, layers__2__self_attn__indexer__q_layernorm__add__weight, layers__2__self_attn__indexer__k_layernorm__add__weight, positions, inv_freq, layers__2__self_attn__indexer__index_k_cache, layers__2__self_attn__indexer__index_k_ring, layers__2__self_attn__indexer__index_position_ring, query_start_loc, seq_lens, slot_ids, block_table, num_seqs, [2, 1, 1], 4, 1e-06)  # bfloat16[T, 32]
    layers__2__self_attn__indexer__qsa_select = torch.ops.q4e.qsa_select.default(layers__2__self_attn__indexer__qsa_indexer, layers__2__self_attn__indexer__index_k_cache, query_start_loc, seq_lens, block_table, num_seqs, 16, 4)  # int32[T, 4]
    layers__2__self_attn__q_proj_k_proj_v_proj = torch.ops.aten.linear.default(layers__2__attn_hyper_connection__hc_read__mixed, layers__2__self_attn__q_proj_k_proj_v_proj__cat__weight)  # bfloat16[T, 192]
    layers__2__self_attn__qsa_attention = torch.ops.q4e.qsa_attention.default(layers__2__self_attn__q_proj_k_proj_v_proj, layers__2__self_attn__q_norm__add__weight, layers__2__self_attn__k_norm__add__weight, positions, inv_freq, layers__2__self_attn__indexer__qsa_select, layers__2__self_attn__kv_cache, query_start_loc, seq_lens, block_table, num_seqs, 4, [2, 1, 1], 4, 1e-06)  # bfloat16[T, 64]
    layers__2__self_attn__o_proj__linear = torch.ops.aten.linear.default(layers__2__self_attn__qsa_attention, layers__2__self_attn__o_proj__weight)  # bfloat16[T, 32]
    layers__2__mlp_hyper_connection__hc_read = torch.ops.q4e.hc_read.default(layers__2__attn_hyper_connection__hc_read__combined, layers__2__self_attn__o_proj__linear, layers__2__attn_hyper_connection__hc_read__inject, layers__2__mlp_hyper_connection__hc_norm__add__weight, layers__2__mlp_hyper_connection__hc_project__cat__weight, layers__2__mlp_hyper_connection__input_mix_weight_up__weight, 1e-06)  # bfloat16[T, 128], bfloat16[T, 32], bfloat16[T, 4]
    layers__2__mlp_hyper_connection__hc_read__combined = layers__2__mlp_hyper_connection__hc_read[0]  # bfloat16[T, 128]
    layers__2__mlp_hyper_connection__hc_read__mixed = layers__2__mlp_hyper_connection__hc_read[1]  # bfloat16[T, 32]
    layers__2__mlp_hyper_connection__hc_read__inject = layers__2__mlp_hyper_connection__hc_read[2]  # bfloat16[T, 4]
    layers__2__mlp__moe = torch.ops.q4e.moe.default(layers__2__mlp_hyper_connection__hc_read__mixed, layers__2__mlp__gate__weight, layers__2__mlp__experts__gate_up_proj, layers__2__mlp__experts__down_proj, layers__2__mlp__shared_expert__cat__weight, layers__2__mlp__shared_expert__down_proj__weight, layers__2__mlp__shared_expert_gate__weight, query_start_loc, num_seqs, 3, 1)  # bfloat16[T, 32]
    index_select = torch.ops.aten.index_select.default(layers__2__mlp_hyper_connection__hc_read__combined, 0, logits_indices)  # bfloat16[L, 128]
    index_select_1 = torch.ops.aten.index_select.default(layers__2__mlp__moe, 0, logits_indices)  # bfloat16[L, 32]
    index_select_2 = torch.ops.aten.index_select.default(layers__2__mlp_hyper_connection__hc_read__inject, 0, logits_indices)  # bfloat16[L, 4]
    hyper_connection_mixer__hc_combine_norm = torch.ops.q4e.hc_combine_norm.default(index_select, index_select_1, index_select_2, hyper_connection_mixer__hc_norm__add__weight, 1e-06)  # bfloat16[L, 128], bfloat16[L, 128]
    hyper_connection_mixer__hc_combine_norm__normed = hyper_connection_mixer__hc_combine_norm[1]  # bfloat16[L, 128]
    hyper_connection_mixer__input_mix_weight_down__linear = torch.ops.aten.linear.default(hyper_connection_mixer__hc_combine_norm__normed, hyper_connection_mixer__input_mix_weight_down__weight)  # bfloat16[L, 16]
    hyper_connection_mixer__div = torch.ops.aten.div.Tensor(hyper_connection_mixer__input_mix_weight_down__linear, 4)  # bfloat16[L, 16]
    hyper_connection_mixer__silu = torch.ops.aten.silu.default(hyper_connection_mixer__div)  # bfloat16[L, 16]
    hyper_connection_mixer__hc_gate_mix = torch.ops.q4e.hc_gate_mix.default(hyper_connection_mixer__silu, hyper_connection_mixer__input_mix_weight_up__weight, hyper_connection_mixer__hc_combine_norm__normed, 4)  # bfloat16[L, 32]
    lm_head__linear = torch.ops.aten.linear.default(hyper_connection_mixer__hc_gate_mix, lm_head__weight)  # bfloat16[L, 96]
    return (lm_head__linear,)
