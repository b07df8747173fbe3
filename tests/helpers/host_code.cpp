// In the place of NVIDIA's host code of NCCL: writes each call to the file HOST_CODE_LOG, and uses the
// CUDA driver and NVML as that code does. Each member of a communicator shares 2 MiB with the next.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "abi.h"

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned,
                                                    unsigned long long, int*);
EXPORT cudaError_t cudaGetDevice(int*);
EXPORT cudaError_t cudaMemcpy(void*, const void*, size_t, int);
EXPORT cudaError_t cudaDeviceGetPCIBusId(char*, int, int);

struct ncclComm {
  int rank, size;
  uint64_t handle, pointer, host;
  bool waits;  // its next state is ncclInProgress
};

namespace {

constexpr size_t kBytes = 2 << 20;

void say(const char* format, ...) {
  char line[300];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  line[length++] = '\n';
  int file = open((getenv("HOST_CODE_LOG") + std::string(".") + getenv("RANK")).c_str(),
                  O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (write(file, line, length) != length) abort();
  close(file);
}

template <class... Arguments>
void driver(const char* name, Arguments... arguments) {
  void* function = nullptr;
  cudaGetDriverEntryPointByVersion(name, &function, 13000, 0, nullptr);
  if (int error = reinterpret_cast<int (*)(Arguments...)>(function)(arguments...)) {
    say("%s failed: %d", name, error);
    abort();
  }
}

uint64_t map(uint64_t handle) {
  uint64_t pointer;
  driver("cuMemAddressReserve", &pointer, kBytes, size_t{0}, uint64_t{0}, uint64_t{0});
  driver("cuMemMap", pointer, kBytes, size_t{0}, handle, uint64_t{0});
  return pointer;
}

void unmap(uint64_t pointer) {
  driver("cuMemUnmap", pointer, kBytes);
  driver("cuMemAddressFree", pointer, kBytes);
}

uint64_t create(int type, int id) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {type, id};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  uint64_t handle;
  driver("cuMemCreate", &handle, kBytes, const_cast<const CUmemAllocationProp*>(&properties),
         uint64_t{0});
  return handle;
}

// An import of the memory has the creator's content and device, and outlives it.
void check_sharing(const ncclComm& comm, int device) {
  int file, value = 42, read = 0;
  uint64_t imported;
  driver("cuMemExportToShareableHandle", static_cast<void*>(&file), comm.handle, 1, uint64_t{0});
  driver("cuMemImportFromShareableHandle", &imported, reinterpret_cast<void*>(long{file}), 1);
  close(file);
  uint64_t pointer = map(imported);
  driver("cuMemRelease", imported);
  cudaMemcpy(reinterpret_cast<void*>(comm.pointer), &value, sizeof value, 1);
  cudaMemcpy(&read, reinterpret_cast<void*>(pointer), sizeof read, 2);
  driver("cuPointerGetAttribute", static_cast<void*>(&value),
         int{CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL}, pointer);
  unmap(pointer);
  if (read != 42 || value != device) say("the import differs: %d %d", read, value);
}

void check_nvml(int device) {
  char id[32];
  void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *handle = nullptr;
  cudaDeviceGetPCIBusId(id, sizeof id, device);
  auto find = reinterpret_cast<int (*)(const char*, void**)>(
      dlsym(nvml, "nvmlDeviceGetHandleByPciBusId"));
  unsigned index = 99;
  auto number = reinterpret_cast<int (*)(void*, unsigned*)>(dlsym(nvml, "nvmlDeviceGetIndex"));
  if (find(id, &handle) || number(handle, &index) || int(index) != device)
    say("NVML differs: %s %u", id, index);
}

ncclResult_t make(ncclComm_t* out, int rank, int size, const ncclConfig_t* config) {
  int device;
  cudaGetDevice(&device);
  auto comm = new ncclComm{rank, size, create(CU_MEM_LOCATION_TYPE_DEVICE, device), 0, 0, false};
  comm->pointer = map(comm->handle);
  check_sharing(*comm, device);
  check_nvml(device);
  *out = comm;
  comm->waits = config && config->blocking == 0;
  return comm->waits ? ncclInProgress : ncclSuccess;
}

void say_config(const char* call, const ncclConfig_t* config) {
  say("%s blocking %d CTAs %d %d share %d", call, config->blocking, config->minCTAs,
      config->maxCTAs, config->splitShare);
}

ncclResult_t end(const char* call, ncclComm_t comm) {
  say("%s", call);
  unmap(comm->pointer);
  driver("cuMemRelease", comm->handle);
  if (comm->host) driver("cuMemRelease", comm->host);
  delete comm;
  return ncclSuccess;
}

}  // namespace

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = 23099;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  int file = open("/dev/urandom", O_RDONLY);
  if (read(file, id->internal, 40) != 40) abort();
  close(file);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* out, int size, ncclUniqueId, int rank, ncclConfig_t* config) {
  if (config) say_config("init", config);
  return make(out, rank, size, config);
}
EXPORT ncclResult_t ncclCommSplit(
    ncclComm_t parent, int color, int, ncclComm_t* out, ncclConfig_t* config) {
  if (config) say_config("split", config);
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  return make(out, parent->rank, parent->size, config);
}
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) {
  say("finalize");
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end("destroy", comm); }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return end("abort", comm); }
EXPORT ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  say("suspend %d", flags);
  comm->host = create(3, 0);  // CU_MEM_LOCATION_TYPE_HOST_NUMA
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommResume(ncclComm_t comm) {
  say("resume");
  driver("cuMemRelease", comm->host);
  comm->host = 0;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommMemStats(ncclComm_t, ncclCommMemStat_t what, uint64_t* value) {
  *value = 1000 + what;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  *state = comm->waits ? ncclInProgress : ncclSuccess;
  comm->waits = false;
  return ncclSuccess;
}
EXPORT const char* ncclGetLastError(ncclComm_t) { return "an error"; }
EXPORT ncclResult_t ncclGroupStart() {
  say("(");
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() {
  say(")");
  return ncclSuccess;
}
EXPORT ncclResult_t ncclAllReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t,
                                  ncclComm_t, cudaStream_t) {
  say("all-reduce %zu type %d", count, type);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int peer, ncclComm_t,
                             cudaStream_t) {
  say("send %d", peer);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int peer, ncclComm_t, cudaStream_t) {
  say("receive %d", peer);
  return ncclSuccess;
}
