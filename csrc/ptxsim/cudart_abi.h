// SPDX-License-Identifier: Apache-2.0
// The parts of the CUDA 13 runtime ABI that the replacement library speaks: layouts written from
// the documented structures, so that the simulator builds without a toolkit.
#ifndef PTXSIM_CUDART_ABI_H_
#define PTXSIM_CUDART_ABI_H_

#include <cstddef>
#include <cstdint>

struct SimDim3 {
  unsigned x, y, z;
};

struct SimLaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster_dim;
    int cooperative;
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(SimLaunchAttribute) == 72, "cudaLaunchAttribute");

struct SimLaunchConfig {
  SimDim3 grid, block;
  size_t dynamic_smem;
  void* stream;
  SimLaunchAttribute* attrs;
  unsigned num_attrs;
};

struct SimFuncAttributes {
  size_t shared_size, const_size, local_size;
  int max_threads, num_regs, ptx_version, binary_version, cache_mode_ca, max_dynamic_shared,
      carveout;
  int cluster_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy,
      non_portable_cluster;
  int reserved[16];
};

struct SimPointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

// cudaDeviceProp of CUDA 13.
struct SimDeviceProp {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_node_mask;
  size_t total_global_mem, shared_mem_per_block;
  int regs_per_block, warp_size;
  size_t mem_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid_size[3];
  size_t total_const_mem;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  int multi_processor_count, integrated, can_map_host_memory;
  int textures[1 + 1 + 2 + 2 + 3 + 2 + 3 + 3 + 1 + 2 + 3 + 2];
  int surfaces[1 + 2 + 3 + 2 + 3 + 1 + 2];
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, async_engines,
      unified_addressing, memory_bus_width, l2_cache_size, persisting_l2_max, max_threads_per_sm,
      stream_priorities, global_l1, local_l1;
  size_t shared_mem_per_sm;
  int regs_per_sm, managed_memory, multi_gpu, multi_gpu_group, host_native_atomic, pageable_access,
      concurrent_managed, compute_preemption, host_pointer_for_registered, cooperative_launch;
  size_t shared_mem_optin;
  int pageable_host_tables, direct_managed, max_blocks_per_sm, access_policy_window;
  size_t reserved_shared_mem;
  int host_register, sparse_array, host_register_read_only, timeline_semaphore, memory_pools,
      gpudirect;
  unsigned gpudirect_flush;
  int gpudirect_ordering;
  unsigned pool_handle_types;
  int deferred_array, ipc_event, cluster_launch, unified_functions, numa_config, numa_id, mps,
      host_numa;
  unsigned pci_device_id, pci_subsystem_id;
  int host_numa_multinode;
  int reserved[56];
};

#endif  // PTXSIM_CUDART_ABI_H_
