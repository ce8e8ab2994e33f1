//! The parts of rdma-core's interface that this provider uses: layouts and constants, as
//! `infiniband/verbs.h` and `rdma/rdma_cma.h` have them on 64-bit Linux. `tests/verbs_layout.rs`
//! compares every layout with the headers.

#![allow(non_camel_case_types)]

use libc::{c_char, c_int, c_uint, c_void};

pub(super) const WR_RDMA_WRITE: c_int = 0;
pub(super) const WR_RDMA_WRITE_WITH_IMM: c_int = 1;
pub(super) const WR_SEND: c_int = 2;
pub(super) const WR_RDMA_READ: c_int = 4;
pub(super) const WR_ATOMIC_CMP_AND_SWP: c_int = 5;
pub(super) const WR_ATOMIC_FETCH_AND_ADD: c_int = 6;
pub(super) const WR_BIND_MW: c_int = 8;
pub(super) const WR_SEND_WITH_INV: c_int = 9;

pub(super) const SEND_FENCE: c_uint = 1;
pub(super) const SEND_SIGNALED: c_uint = 2;
pub(super) const SEND_SOLICITED: c_uint = 4;
pub(super) const SEND_INLINE: c_uint = 8;

pub(super) const WC_SUCCESS: c_int = 0;
pub(super) const WC_LOC_LEN_ERR: c_int = 1;
pub(super) const WC_WR_FLUSH_ERR: c_int = 5;
pub(super) const WC_REM_INV_REQ_ERR: c_int = 9;
pub(super) const WC_REM_ACCESS_ERR: c_int = 10;
pub(super) const WC_REM_OP_ERR: c_int = 11;
pub(super) const WC_RNR_RETRY_EXC_ERR: c_int = 13;
pub(super) const WC_RECV_RDMA_WITH_IMM: c_int = 129;
pub(super) const WC_WITH_IMM: c_uint = 2;
pub(super) const WC_WITH_INV: c_uint = 8;

pub(super) const ACCESS_LOCAL_WRITE: c_uint = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_uint = 2;
pub(super) const ACCESS_REMOTE_READ: c_uint = 4;
pub(super) const ACCESS_REMOTE_ATOMIC: c_uint = 8;
pub(super) const ACCESS_MW_BIND: c_uint = 16;
pub(super) const ACCESS_ON_DEMAND: c_uint = 64;

/// Windows of type 2, which queue pairs bind and peers can revoke (2A and 2B differ in what they are checked against).
pub(super) const DEVICE_MEM_WINDOW_TYPE_2: c_uint = 1 << 23 | 1 << 24;
pub(super) const MW_TYPE_2: c_int = 2;

pub(super) const ODP_SUPPORT: u64 = 1;
/// Send, receive, write and read.
pub(super) const ODP_TRANSPORT: u32 = 1 | 2 | 4 | 8;

/// What siw says its vendor is.
pub(super) const VENDOR_SIW: u32 = 0x62_6d74;
/// What rxe says its vendor is.
pub(super) const VENDOR_RXE: u32 = 0xff_ffff;

pub(super) const QPT_RC: c_int = 2;
pub(super) const QPS_INIT: c_int = 1;
pub(super) const QPS_ERR: c_int = 6;
pub(super) const QP_STATE: c_int = 1;
pub(super) const QP_ACCESS_FLAGS: c_int = 8;
pub(super) const QP_PKEY_INDEX: c_int = 16;
pub(super) const QP_PORT: c_int = 32;

pub(super) const PS_TCP: c_int = 0x0106;
pub(super) const EVENT_ADDR_RESOLVED: c_int = 0;
pub(super) const EVENT_ADDR_ERROR: c_int = 1;
pub(super) const EVENT_ROUTE_RESOLVED: c_int = 2;
pub(super) const EVENT_ROUTE_ERROR: c_int = 3;
pub(super) const EVENT_CONNECT_REQUEST: c_int = 4;
pub(super) const EVENT_CONNECT_ERROR: c_int = 6;
pub(super) const EVENT_UNREACHABLE: c_int = 7;
pub(super) const EVENT_REJECTED: c_int = 8;
pub(super) const EVENT_ESTABLISHED: c_int = 9;
pub(super) const EVENT_DISCONNECTED: c_int = 10;
pub(super) const EVENT_DEVICE_REMOVAL: c_int = 11;

/// Asynchronous events that concern a queue pair.
pub(super) const ASYNC_QP_EVENTS: std::ops::RangeInclusive<c_int> = 1..=7;
pub(super) const ASYNC_CQ_ERR: c_int = 0;
pub(super) const ASYNC_QP_FATAL: c_int = 1;
pub(super) const ASYNC_QP_REQ_ERR: c_int = 2;
pub(super) const ASYNC_QP_ACCESS_ERR: c_int = 3;
pub(super) const ASYNC_DEVICE_FATAL: c_int = 8;
pub(super) const ASYNC_PORT_ERR: c_int = 10;
pub(super) const ASYNC_SRQ_ERR: c_int = 14;

#[repr(C)]
pub(super) struct ibv_context {
    pub(super) device: *mut c_void,
    pub(super) ops: ibv_context_ops,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    _num_comp_vectors: c_int,
    _mutex: libc::pthread_mutex_t,
    /// All ones if this is the end of a `verbs_context`.
    pub(super) abi_compat: *mut c_void,
}

type Unused = Option<unsafe extern "C" fn()>;

/// Only what is called has a type.
#[repr(C)]
pub(super) struct ibv_context_ops {
    _compat_1: [Unused; 7],
    pub(super) alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, c_int) -> *mut ibv_mw>,
    _bind_mw: Unused,
    pub(super) dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
    _create_cq: Unused,
    pub(super) poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int,
    _compat_2: [Unused; 7],
    pub(super) post_srq_recv:
        Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    _compat_3: [Unused; 4],
    pub(super) post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
    pub(super) post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    _compat_4: [Unused; 5],
}

pub(super) enum ibv_pd {}

#[repr(C)]
pub(super) struct ibv_comp_channel {
    pub(super) context: *mut ibv_context,
    pub(super) fd: c_int,
}

#[repr(C)]
pub(super) struct ibv_mr {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

#[repr(C)]
pub(super) struct ibv_mw {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    pub(super) rkey: u32,
    pub(super) handle: u32,
}

#[repr(C)]
pub(super) struct ibv_srq {
    pub(super) context: *mut ibv_context,
}

#[repr(C)]
pub(super) struct ibv_srq_init_attr {
    pub(super) srq_context: *mut c_void,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

#[repr(C)]
pub(super) struct ibv_cq {
    pub(super) context: *mut ibv_context,
    _rest: [u8; 0],
}

#[repr(C)]
pub(super) struct ibv_qp {
    pub(super) context: *mut ibv_context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut ibv_pd,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) recv_cq: *mut ibv_cq,
    pub(super) srq: *mut ibv_srq,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ibv_qp_cap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct ibv_qp_init_attr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) recv_cq: *mut ibv_cq,
    pub(super) srq: *mut ibv_srq,
    pub(super) cap: ibv_qp_cap,
    pub(super) qp_type: c_int,
    pub(super) sq_sig_all: c_int,
}

/// `ibv_qp_attr`, of which only a few fields are set here.
#[repr(C)]
pub(super) struct ibv_qp_attr {
    pub(super) qp_state: c_int,
    pub(super) cur_qp_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) path_mig_state: c_int,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: ibv_qp_cap,
    pub(super) ah_attr: [u64; 4],
    pub(super) alt_ah_attr: [u64; 4],
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ibv_sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

#[repr(C)]
pub(super) struct ibv_send_wr {
    pub(super) wr_id: u64,
    pub(super) next: *mut ibv_send_wr,
    pub(super) sg_list: *mut ibv_sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_int,
    pub(super) send_flags: c_uint,
    /// Immediate in network order, or the key to invalidate.
    pub(super) imm_or_rkey: u32,
    pub(super) remote_addr: u64,
    /// Remote key of a write or read (first half), or the first operand of an atomic.
    pub(super) rkey_or_compare_add: u64,
    pub(super) swap: u64,
    pub(super) atomic_rkey: u32,
    _pad: u32,
    _xrc: u64,
    pub(super) window: bind_mw,
}

/// The part of a request that binds a window.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct bind_mw {
    pub(super) mw: *mut ibv_mw,
    pub(super) rkey: u32,
    pub(super) mr: *mut ibv_mr,
    pub(super) addr: u64,
    pub(super) length: u64,
    pub(super) mw_access_flags: c_uint,
}

#[repr(C)]
pub(super) struct ibv_recv_wr {
    pub(super) wr_id: u64,
    pub(super) next: *mut ibv_recv_wr,
    pub(super) sg_list: *mut ibv_sge,
    pub(super) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ibv_wc {
    pub(super) wr_id: u64,
    pub(super) status: c_int,
    pub(super) opcode: c_int,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_or_rkey: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

#[repr(C)]
pub(super) struct ibv_device_attr {
    pub(super) fw_ver: [c_char; 64],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    pub(super) max_ee_init_rd_atom: c_int,
    pub(super) atomic_cap: c_int,
    pub(super) max_ee: c_int,
    pub(super) max_rdd: c_int,
    pub(super) max_mw: c_int,
    pub(super) unused: [c_int; 8],
    pub(super) max_srq: c_int,
    pub(super) max_srq_wr: c_int,
    pub(super) max_srq_sge: c_int,
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// As much of `ibv_device_attr_ex` as is asked for.
#[repr(C)]
pub(super) struct ibv_device_attr_ex {
    pub(super) orig_attr: ibv_device_attr,
    pub(super) comp_mask: u32,
    pub(super) odp_general_caps: u64,
    pub(super) odp_rc_caps: u32,
    pub(super) odp_other_caps: [u32; 2],
}

pub(super) type query_device_ex =
    unsafe extern "C" fn(*mut ibv_context, *const u32, *mut ibv_device_attr_ex, usize) -> c_int;

/// How far before the `ibv_context` inside a `verbs_context` the latter keeps its `query_device_ex`, and its size.
pub(super) const QUERY_DEVICE_EX_BEFORE: usize = 13 * 8;
pub(super) const SIZE_BEFORE: usize = 8;

#[repr(C)]
pub(super) struct ibv_async_event {
    /// A queue pair, a completion queue, a shared receive queue, or the number of a port.
    pub(super) element: *mut c_void,
    pub(super) event_type: c_int,
}

#[repr(C)]
pub(super) struct rdma_event_channel {
    pub(super) fd: c_int,
}

#[repr(C)]
pub(super) struct rdma_addr {
    pub(super) src: libc::sockaddr_storage,
    pub(super) dst: libc::sockaddr_storage,
    pub(super) ib: [u64; 5],
}

#[repr(C)]
pub(super) struct rdma_cm_id {
    pub(super) verbs: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) context: *mut c_void,
    pub(super) qp: *mut ibv_qp,
    pub(super) addr: rdma_addr,
    pub(super) path_rec: *mut c_void,
    pub(super) num_paths: c_int,
    _pad: c_int,
    pub(super) ps: c_int,
    pub(super) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct rdma_conn_param {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

#[repr(C)]
pub(super) struct rdma_cm_event {
    pub(super) id: *mut rdma_cm_id,
    pub(super) listen_id: *mut rdma_cm_id,
    pub(super) event: c_int,
    pub(super) status: c_int,
    pub(super) conn: rdma_conn_param,
}

/// Sizes and offsets, by the names that the headers use.
pub(super) fn layouts() -> Vec<(&'static str, usize)> {
    use std::mem::{offset_of, size_of};
    macro_rules! layouts {
        ($($kind:ident { $($field:ident: $name:literal),* })*) => {
            vec![$($((concat!("offsetof(struct ", stringify!($kind), ", ", $name, ")"), offset_of!($kind, $field)),)*)*]
        };
    }
    let mut all = layouts! {
        ibv_context { ops: "ops", cmd_fd: "cmd_fd", async_fd: "async_fd", abi_compat: "abi_compat" }
        ibv_context_ops { alloc_mw: "alloc_mw", dealloc_mw: "dealloc_mw", poll_cq: "poll_cq", req_notify_cq: "req_notify_cq", post_srq_recv: "post_srq_recv", post_send: "post_send", post_recv: "post_recv" }
        ibv_mr { addr: "addr", length: "length", lkey: "lkey", rkey: "rkey" }
        ibv_mw { pd: "pd", rkey: "rkey", handle: "handle" }
        ibv_srq { context: "context" }
        ibv_srq_init_attr { max_wr: "attr.max_wr", max_sge: "attr.max_sge", srq_limit: "attr.srq_limit" }
        ibv_comp_channel { fd: "fd" }
        ibv_cq { context: "context" }
        ibv_qp { context: "context", pd: "pd", srq: "srq", qp_num: "qp_num" }
        ibv_qp_init_attr { send_cq: "send_cq", srq: "srq", cap: "cap", qp_type: "qp_type", sq_sig_all: "sq_sig_all" }
        ibv_qp_attr { qp_access_flags: "qp_access_flags", ah_attr: "ah_attr", alt_ah_attr: "alt_ah_attr", pkey_index: "pkey_index", port_num: "port_num", rate_limit: "rate_limit" }
        ibv_sge { addr: "addr", length: "length", lkey: "lkey" }
        ibv_send_wr { next: "next", sg_list: "sg_list", num_sge: "num_sge", opcode: "opcode", send_flags: "send_flags", imm_or_rkey: "imm_data", remote_addr: "wr.rdma.remote_addr", rkey_or_compare_add: "wr.rdma.rkey", swap: "wr.atomic.swap", atomic_rkey: "wr.atomic.rkey", window: "bind_mw" }
        ibv_recv_wr { next: "next", sg_list: "sg_list", num_sge: "num_sge" }
        ibv_wc { status: "status", opcode: "opcode", byte_len: "byte_len", imm_or_rkey: "imm_data", qp_num: "qp_num", wc_flags: "wc_flags" }
        ibv_device_attr { max_qp_wr: "max_qp_wr", max_sge: "max_sge", max_cqe: "max_cqe", max_qp_rd_atom: "max_qp_rd_atom", max_qp_init_rd_atom: "max_qp_init_rd_atom", atomic_cap: "atomic_cap", max_mw: "max_mw", max_srq: "max_srq", max_srq_wr: "max_srq_wr", max_srq_sge: "max_srq_sge", phys_port_cnt: "phys_port_cnt" }
        ibv_device_attr_ex { comp_mask: "comp_mask", odp_general_caps: "odp_caps.general_caps", odp_rc_caps: "odp_caps.per_transport_caps.rc_odp_caps" }
        ibv_async_event { element: "element", event_type: "event_type" }
        rdma_event_channel { fd: "fd" }
        rdma_cm_id { verbs: "verbs", channel: "channel", context: "context", qp: "qp", addr: "route.addr", ps: "ps", port_num: "port_num" }
        rdma_conn_param { private_data_len: "private_data_len", responder_resources: "responder_resources", initiator_depth: "initiator_depth", retry_count: "retry_count", rnr_retry_count: "rnr_retry_count", qp_num: "qp_num" }
        rdma_cm_event { id: "id", listen_id: "listen_id", event: "event", status: "status", conn: "param.conn" }
    };
    all.extend([
        (
            "offsetof(struct verbs_context, context) - offsetof(struct verbs_context, query_device_ex)",
            QUERY_DEVICE_EX_BEFORE,
        ),
        ("offsetof(struct verbs_context, context) - offsetof(struct verbs_context, sz)", SIZE_BEFORE),
        (
            "offsetof(struct ibv_send_wr, bind_mw.rkey) - offsetof(struct ibv_send_wr, bind_mw)",
            offset_of!(bind_mw, rkey),
        ),
        (
            "offsetof(struct ibv_send_wr, bind_mw.bind_info.addr) - offsetof(struct ibv_send_wr, bind_mw)",
            offset_of!(bind_mw, addr),
        ),
        (
            "offsetof(struct ibv_send_wr, bind_mw.bind_info.mw_access_flags) - offsetof(struct ibv_send_wr, bind_mw)",
            offset_of!(bind_mw, mw_access_flags),
        ),
        ("sizeof(struct ibv_srq_init_attr)", size_of::<ibv_srq_init_attr>()),
        ("sizeof(struct ibv_context_ops)", size_of::<ibv_context_ops>()),
        ("sizeof(struct ibv_qp_init_attr)", size_of::<ibv_qp_init_attr>()),
        ("sizeof(struct ibv_qp_attr)", size_of::<ibv_qp_attr>()),
        ("sizeof(struct ibv_send_wr)", size_of::<ibv_send_wr>()),
        ("sizeof(struct ibv_recv_wr)", size_of::<ibv_recv_wr>()),
        ("sizeof(struct ibv_wc)", size_of::<ibv_wc>()),
        ("sizeof(struct ibv_device_attr)", size_of::<ibv_device_attr>()),
        ("sizeof(struct ibv_async_event)", size_of::<ibv_async_event>()),
        ("sizeof(struct rdma_addr)", size_of::<rdma_addr>()),
        ("sizeof(struct rdma_conn_param)", size_of::<rdma_conn_param>()),
    ]);
    all
}
