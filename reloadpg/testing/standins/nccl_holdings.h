// What a communicator holds and what a process keeps, as measured with NVIDIA's host code of NCCL
// 2.30.7 (built from its source without device code, over a stand-in for the driver that shows H100
// devices with NVLinks to a switch; one host, so the memory of kernels and of the context is not in
// the figures). Device memory and pinned host memory are only counted.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "internal.h"

namespace standin {

// Bytes of a communicator on one rank. A suspend copies `connected - left` to pinned host memory.
struct Footprint {
  long init, connected;  // at creation; once an operation has connected its members
  long left;             // of `connected`, after a suspend: NVLS, network buffers, and 4 MiB
  long network;          // network buffers, which are in no value of ncclCommMemStats
  long pinned;           // host memory while it lives
};

struct Measured {
  int ranks;   // from this number of ranks on
  bool nvls;   // the devices support multicast
  bool whole;  // all transports are connected at creation (NCCL_RUNTIME_CONNECT=0)
  long init, connected, left, network;  // MiB
};

constexpr Measured kMeasured[] = {
    {1, false, false, 388, 388, 4, 0},
    {2, false, false, 196, 484, 4, 0},      // 2 and 4 ranks
    {2, true, false, 230, 518, 38, 0},      // 2 and 4 ranks
    {2, false, true, 740, 740, 260, 256},   // 484 and network buffers
    {4, true, true, 1142, 1142, 422, 256},  // rank 0
};
constexpr long kPinned = 1179652;
constexpr long kLeftSuspended = 4 << 20;  // on the device by an end while it is suspended; and kPinned

inline bool switched_off(const char* variable) {
  const char* value = getenv(variable);
  return value && !strcmp(value, "0");
}

inline Footprint footprint(int ranks) {
  bool whole = switched_off("NCCL_RUNTIME_CONNECT") && ranks > 1;
  bool nvls = number("NVLS", 0) && !switched_off("NCCL_NVLS_ENABLE");
  Measured row = kMeasured[0];
  for (const Measured& each : kMeasured)
    if (each.ranks <= ranks && each.whole == whole && each.nvls <= nvls) row = each;
  return {row.init << 20, row.connected << 20, row.left << 20, row.network << 20, kPinned};
}

inline std::atomic<long>& pinned() {  // host memory of suspended communicators of this process
  static std::atomic<long> bytes{0};
  return bytes;
}

inline std::atomic<long>& left() {  // device memory that ends of suspended communicators have left
  static std::atomic<long> bytes{0};
  return bytes;
}

// What stays of the first communicator until the process ends: the thread of NCCL's RAS, a listener
// and four other descriptors. NCCL's listener has port 28028 if it is free; this one has any.
inline void keep_ras() {
  static std::mutex mutex;
  static pid_t process = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (process == getpid() || switched_off("NCCL_RAS_ENABLE")) return;
  process = getpid();
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) ||
      listen(listener, 16))
    return;
  int wake[2];
  if (pipe2(wake, O_CLOEXEC)) return;
  eventfd(0, EFD_CLOEXEC);
  eventfd(0, EFD_CLOEXEC);
  std::thread([end = wake[0]] {
    pthread_setname_np(pthread_self(), "standin-ras");
    for (pollfd waited{end, POLLIN, 0};;) poll(&waited, 1, -1);
  }).detach();
}

// The file of shared memory that a communicator with network transports has while it lives (of its
// proxy's operations); a killed process leaves it. It is in the job's folder, which is in /dev/shm, so
// that a job leaves nothing behind.
class ShmFile {
 public:
  ~ShmFile() { remove(); }
  void create() {
    std::string path = std::string(standin_job()) + "/nccl-XXXXXX";
    int file = mkostemp(&path[0], O_CLOEXEC);
    if (file < 0) return;
    close(file);
    path_ = path;
  }
  void remove() {
    if (!path_.empty()) unlink(path_.c_str());
    path_.clear();
  }

 private:
  std::string path_;
};

}  // namespace standin
