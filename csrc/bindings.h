// Functions that add one group of bindings each to the module.

#pragma once

#include <nanobind/nanobind.h>

namespace moeserve {

void bind_attention(nanobind::module_& module);
void bind_compressed_attention(nanobind::module_& module);
void bind_expert_store(nanobind::module_& module);
void bind_indexer(nanobind::module_& module);
void bind_layers(nanobind::module_& module);
void bind_limits(nanobind::module_& module);
void bind_mixing(nanobind::module_& module);
void bind_products(nanobind::module_& module);
void bind_progress(nanobind::module_& module);
void bind_recurrent(nanobind::module_& module);
void bind_shared_memory(nanobind::module_& module);

}  // namespace moeserve
