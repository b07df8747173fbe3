// Functions that the libraries of the stand-ins share within a process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "abi.h"

// Defined by the stand-in for the CUDA runtime.
EXPORT const char* standin_job();  // the job's folder; empty outside of a job
EXPORT bool standin_alive(int pid);  // whether a process exists and is not a zombie
EXPORT int standin_physical_device(int device);  // its number without CUDA_VISIBLE_DEVICES
EXPORT bool standin_has_context(int device);
EXPORT bool standin_take(int device, long bytes);  // allocate device memory; false if none is left
EXPORT long standin_pin(long bytes);  // count allocated host memory; returns the process's
EXPORT void standin_enqueue(cudaStream_t stream, std::function<void()>* operation);
EXPORT bool standin_capturing(cudaStream_t stream);
EXPORT void standin_keep_with_graph(cudaStream_t stream, const std::shared_ptr<void>& object);
// Memory that the runtime did not allocate, of a device or pinned memory of the host.
EXPORT void standin_remember(void* pointer, size_t size, int device, bool on_device);
EXPORT void standin_forget(void* pointer);
EXPORT bool standin_block(void* pointer, void** start, size_t* size, int* device, bool* on_device);
EXPORT void* standin_driver_function(const char* name);  // that NVIDIA's NCCL uses; or null

namespace standin {

inline std::string setting(const char* name, const char* otherwise = "") {
  const char* value = getenv(("RELOADPG_STANDIN_" + std::string(name)).c_str());
  return value && *value ? value : otherwise;
}

inline long number(const char* name, long otherwise) {
  std::string text = setting(name);
  return text.empty() ? otherwise : atol(text.c_str());
}

// The file of NVIDIA's host code of NCCL, which runs in addition to the stand-in; or null.
inline const char* nvidias_nccl() {
  const char* path = getenv("RELOADPG_NCCL");
  return path && *path ? path : nullptr;
}

inline std::string pci_bus_id(int physical_device) {
  char text[16];
  int bus = 0x10 + 0x10 * (physical_device % 8) + physical_device / 8;
  snprintf(text, sizeof text, "0000:%02x:00.0", bus & 0xff);
  return text;
}

}  // namespace standin
