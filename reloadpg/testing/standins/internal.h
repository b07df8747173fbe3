// Functions that the libraries of the stand-ins share within a process.
#pragma once

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
EXPORT void standin_enqueue(cudaStream_t stream, std::function<void()>* operation);
EXPORT bool standin_capturing(cudaStream_t stream);
EXPORT void standin_keep_with_graph(cudaStream_t stream, const std::shared_ptr<void>& object);

namespace standin {

inline std::string setting(const char* name, const char* otherwise = "") {
  const char* value = getenv(("RELOADPG_STANDIN_" + std::string(name)).c_str());
  return value && *value ? value : otherwise;
}

inline long number(const char* name, long otherwise) {
  std::string text = setting(name);
  return text.empty() ? otherwise : atol(text.c_str());
}

}  // namespace standin
