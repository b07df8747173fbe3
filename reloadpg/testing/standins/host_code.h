// NVIDIA's host code of NCCL, in addition to the stand-in: the library that RELOADPG_NCCL names. It is
// built by its user and linked to a dynamic CUDA runtime, for which it gets the stand-in's.
//
// Each communicator of the stand-in, which moves the data, has one of that library. Creation, split,
// finalize, destroy, abort, suspend, resume and memory statistics go to both. Of the operations, the
// first of each kind goes to both too: the library connects for it, and its kernels are not run.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "internal.h"

namespace host_code {

inline bool given() { return standin::nvidias_nccl() != nullptr; }

inline void* library() {  // null if it cannot be loaded, which is printed
  static void* loaded = [] {
    Dl_info own;
    dladdr(reinterpret_cast<void*>(&standin_driver_function), &own);
    std::string folder = own.dli_fname;
    folder.resize(folder.rfind('/'));
    // It opens this file by its name; the one that is loaded is taken. So it is for libcudart.
    dlopen((folder + "/libnvidia-ml.so.1").c_str(), RTLD_NOW);
    // Its own functions call each other, and not those of the stand-in for NCCL.
    void* opened = dlopen(standin::nvidias_nccl(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!opened)
      fprintf(stderr, "reloadpg stand-ins: RELOADPG_NCCL cannot be loaded: %s\n", dlerror());
    return opened;
  }();
  return loaded;
}

template <class... Arguments>
ncclResult_t call(const char* name, Arguments... arguments) {
  void* function = library() ? dlsym(library(), name) : nullptr;
  if (!function) return ncclInvalidUsage;
  return reinterpret_cast<ncclResult_t (*)(Arguments...)>(function)(arguments...);
}

inline std::string last_error(ncclComm_t comm) {
  void* function = library() ? dlsym(library(), "ncclGetLastError") : nullptr;
  return function ? reinterpret_cast<const char* (*)(ncclComm_t)>(function)(comm)
                  : "RELOADPG_NCCL cannot be used";
}

// Wait for the end of a call on a communicator that does not block.
inline ncclResult_t settled(ncclResult_t result, ncclComm_t comm, const std::atomic<bool>& stop) {
  while (result == ncclInProgress && !stop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ncclResult_t state;
    ncclResult_t known = call("ncclCommGetAsyncError", comm, &state);
    result = known ? known : state;
  }
  return result == ncclInProgress ? ncclSystemError : result;
}

class Config {  // a copy, since a group creates communicators at its end
 public:
  explicit Config(const ncclConfig_t* given) {
    if (!given) return;
    auto bytes = reinterpret_cast<const char*>(given);
    bytes_.assign(bytes, bytes + given->size);
    if (given->size < sizeof(ncclConfig_t)) return;
    if (given->netName) network_ = given->netName;
    if (given->commName) name_ = given->commName;
  }
  ncclConfig_t* get() {
    if (bytes_.empty()) return nullptr;
    auto config = reinterpret_cast<ncclConfig_t*>(bytes_.data());
    if (config->size >= sizeof(ncclConfig_t)) {
      config->netName = network_.empty() ? nullptr : network_.c_str();
      config->commName = name_.empty() ? nullptr : name_.c_str();
    }
    return config;
  }

 private:
  std::vector<char> bytes_;
  std::string network_, name_;
};

}  // namespace host_code
